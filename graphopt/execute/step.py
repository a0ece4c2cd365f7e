"""TrainStep: checks the batch against a signature, runs forward, backward and update, commits all or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from graphopt.capture.batch import BatchBinder, BoundBatch
from graphopt.capture.export import Captured
from graphopt.capture.hooks import refuse_module_hooks, refuse_parameter_hooks
from graphopt.capture.loss_weight import LossWeight
from graphopt.capture.outputs import rebuild
from graphopt.capture.update import CLIP_SCALAR, UpdateRequest
from graphopt.capture.update_bucket import UpdateBucket
from graphopt.errors import BatchError, StateError
from graphopt.execute.cache import SignatureCache, ambient_key, batch_key, describe_batch
from graphopt.execute.executable import Executable, run_before_commit, run_segment
from graphopt.execute.fp8_state import Fp8State
from graphopt.execute.inputs import collect_inputs, refuse_aliased, user_outputs, write_back
from graphopt.execute.interrupts import held_interrupts
from graphopt.execute.ledger import UpdateFacts, UpdateLedger
from graphopt.execute.loss_scaler import make_scaler
from graphopt.execute.model_state import model_state
from graphopt.execute.model_view import ModelView, eval_mode, view_model
from graphopt.execute.paging.store import PagingStatistics
from graphopt.execute.run_update import UpdateRun, run_update
from graphopt.execute.shared_memory import apart_from
from graphopt.execute.state_inputs import state_source
from graphopt.execute.state_rows import StateRow, state_rows
from graphopt.execute.update_info import UpdateInfo
from graphopt.execute.verdict import EMPTY_WINDOW, seen_by
from graphopt.ir.ambient import plain_execution
from graphopt.ir.program import Program
from graphopt.ir.spec import OutputKind, TensorSpec
from graphopt.optim.state import Weights


class GradientPart(Protocol):
    """What a builder gives for a batch signature before the update is known."""

    captured: Captured
    joint: Program
    weight: LossWeight

    @property
    def reached(self) -> tuple[str, ...]: ...
    @property
    def embeddings(self) -> tuple[str, ...]: ...


class StepBuilder(Protocol):
    """What a TrainStep needs from the compiler."""

    model: torch.nn.Module
    binder: BatchBinder
    options: Any
    dump_folders: list[Path]

    def is_current(self, evaluation: Program) -> bool: ...
    def gradient(self, batch: BoundBatch, *, wrt: Sequence[str], title: str) -> Any: ...
    def step(self, built: Any, request: UpdateRequest) -> Executable: ...
    def micro_step(self, built: Any, *, reserved_bytes: int) -> Any: ...
    def window_update(self, parameters: Any, request: UpdateRequest, *, divide: bool) -> Executable: ...
    def evaluation(self, batch: BoundBatch) -> tuple[Captured, Executable]: ...


@dataclass(frozen=True)
class _Compiled:
    """One batch signature: the gradient part, and what runs for it; ``weights``: what runs once a window before it."""

    part: Any
    executable: Executable
    buckets: tuple[UpdateBucket, ...]
    modules: tuple[torch.nn.Module, ...]
    weights: Executable | None = None


class TrainStep:
    """A compiled training step: ``step(**batch)`` runs forward, backward and, once a window is full, the update.

    Parameters, buffers and state change only when a step succeeds. An interrupt during the writing is held until it is
    done; a failure inside it raises StateError, and the step refuses to go on until a state is loaded.
    """

    def __init__(self, builder: StepBuilder) -> None:
        self.builder = builder
        self.model = builder.model
        options = builder.options
        self.state = model_state(self.model, options.optimizer, weights=Weights(options.precision.master))
        self.state.scaler = make_scaler(options.loss_scale, self.state.known.values())
        self.state.fp8 = None if options.precision.fp8 is None else Fp8State(options.precision.fp8)
        self.steps: SignatureCache[_Compiled] = SignatureCache(options.max_signatures)
        self.parts: SignatureCache[Any] = SignatureCache(options.max_signatures)
        self.updates: SignatureCache[Executable] = SignatureCache(options.max_signatures)
        self.evaluations: SignatureCache[tuple[Captured, Executable, Any]] = SignatureCache(options.max_signatures)
        self.ledger = UpdateLedger(self.state)
        self.last_executable: Executable | None = None
        self.broken: str | None = None

    # ---- running -------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The requested outputs by name, as attribute and key; one micro-batch is trained on."""
        self._refuse_broken()
        self.ledger.settle()
        bound, view = self._prepare(args, kwargs)
        if self.accumulates:
            return self._micro_step(bound, view)
        return self._full_step(bound, view)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The requested outputs of a forward in eval mode; nothing is updated, modes are as before."""
        bound = self.builder.binder.bind(args, kwargs)
        with eval_mode(self.model):
            view = self._view()
            captured, executable, _ = self.evaluations.get(
                (batch_key(bound), view.key, ambient_key()),
                lambda: (*self.builder.evaluation(bound), view.modules),
                describe=describe_batch(bound),
                is_current=lambda built: self.builder.is_current(built[1].program),
            )
            self.last_executable = self.last_executable or executable
            source = state_source(self.state, {}, executable.program.fp8.watch)
            inputs = collect_inputs(executable.program, view, bound, source)
            with plain_execution():
                outputs = executable.run(inputs)
        return rebuild(captured.structure, user_outputs(executable.program, outputs))

    def flush(self) -> UpdateInfo | None:
        """Apply an incomplete window, divided by what it holds; None when it is empty."""
        self._refuse_broken()
        if not self.state.window.micro_batches:
            return None
        self._end_window(self._view())
        return self.last_update

    def _view(self) -> ModelView:
        return view_model(self.model, self.builder.options.loss)

    @property
    def accumulates(self) -> bool:
        """Whether more than one micro-batch makes an update."""
        return bool(self.builder.options.accumulate.steps > 1)

    def _prepare(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[BoundBatch, ModelView]:
        bound = self.builder.binder.bind(args, kwargs)
        view = self._view()
        if view.has_hooks:
            refuse_module_hooks(self.model)
        refuse_parameter_hooks(view.parameters)
        self.state.follow(view.parameters)
        return apart_from(bound, view.parameters), view

    def _gradient(self, bound: BoundBatch, view: ModelView) -> Any:
        wrt = [name for name, parameter in view.parameters.items() if parameter.requires_grad]

        def build() -> tuple[Any, tuple[torch.nn.Module, ...]]:
            part = self.builder.gradient(bound, wrt=wrt, title="step")
            self.state.choices.note_embeddings(part.embeddings)
            return part, view.modules

        key = (batch_key(bound), view.key, ambient_key())
        return self.parts.get(key, build, describe=describe_batch(bound))[0]

    def _full_step(self, bound: BoundBatch, view: ModelView) -> Any:
        part = self._gradient(bound, view)
        buckets = self.state.buckets(part.reached)
        compiled = self.steps.get(
            (batch_key(bound), view.key, ambient_key(), buckets),
            lambda: _Compiled(part, self.builder.step(part, self._request(buckets)), buckets, view.modules),
            describe=describe_batch(bound),
        )
        executable = self.last_executable = compiled.executable
        program = executable.program
        refuse_aliased(program, bound)
        inputs = self._inputs(program, view, bound, buckets)
        outputs: list[Any] = [None] * len(program.signature.outputs)
        run_update(
            UpdateRun(executable, inputs, outputs),
            self.ledger,
            commit=self._commit,
            facts=lambda: UpdateFacts(part.reached, self._loss(part, program, outputs)),
        )
        return rebuild(part.captured.structure, user_outputs(program, outputs))

    def _micro_step(self, bound: BoundBatch, view: ModelView) -> Any:
        part = self._gradient(bound, view)
        compiled = self.steps.get(
            (batch_key(bound), view.key, ambient_key()),
            lambda: self._compiled_micro_step(part, view),
            describe=describe_batch(bound),
        )
        executable = self.last_executable = compiled.executable
        program, window = executable.program, self.state.window
        divides = part.weight.weight is not None
        self.state.warn_unproven(part.weight)
        if window.micro_batches and window.divides != divides:
            raise StateError(
                "one window mixes a summed loss with a mean one, whose gradients cannot be added: call step.flush() "
                "before the loss changes its reduction"
            )
        refuse_aliased(program, bound)
        if compiled.weights is not None and self.state.fp8 is not None:
            quantized = compiled.weights
            self.state.fp8.weights.refresh(
                quantized, view.parameters, lambda: self._inputs(quantized.program, view, None, ())
            )
        inputs = self._inputs(program, view, bound, ())
        outputs: list[Any] = [None] * len(program.signature.outputs)
        with plain_execution():
            carried = run_before_commit(executable, inputs, outputs)
            with self._commit():
                run_segment(executable.segments[-1], inputs, carried, outputs)
                write_back(executable, inputs, outputs)
                window.divides = divides
                window.micro_batches += 1
                window.touched.update(dict.fromkeys(part.reached))
                if self.state.fp8 is not None:
                    self.state.fp8.seen += seen_by(program, outputs)
                    self.state.fp8.weights.note_read()
        result = rebuild(part.captured.structure, user_outputs(program, outputs))
        if window.micro_batches >= self.builder.options.accumulate.steps:
            self._end_window(view)
        return result

    def _compiled_micro_step(self, part: Any, view: ModelView) -> _Compiled:
        """The micro-step, planned beside the optimizer state, which it does not read but which is there."""
        state_bytes = self.state.near_bytes(part.reached)
        built = self.builder.micro_step(part, reserved_bytes=state_bytes)
        return _Compiled(part, built.executable, (), view.modules, built.weights)

    def _end_window(self, view: ModelView) -> None:
        window = self.state.window
        if self.state.fp8 is not None:
            self.state.fp8.weights.let_go()
        assert window.weight is not None and window.loss is not None, "a window with micro-batches has totals"
        # The window's own tensors are cleared, and read by Python only later where the program decides.
        weight = window.weight.clone()
        loss = window.loss / weight if window.divides else window.loss.clone()
        micro_batches = window.micro_batches
        if not self.ledger.decides_late and float(weight) == 0.0:
            self.ledger.skipped(UpdateFacts((), 0.0, micro_batches, weight), EMPTY_WINDOW, self.loss_scale)
            return
        names = tuple(name for name in view.parameters if name in window.touched)
        buckets = self.state.buckets(names)
        specs = {name: TensorSpec.of(view.parameters[name]) for name in names}
        executable = self.updates.get(
            (tuple(specs.items()), buckets, window.divides),
            lambda: self.builder.window_update(specs, self._request(buckets), divide=window.divides),
            describe="window update",
        )
        program = executable.program
        inputs = self._inputs(program, view, None, buckets)
        outputs: list[Any] = [None] * len(program.signature.outputs)
        facts = UpdateFacts(names, loss, micro_batches, weight)
        run_update(UpdateRun(executable, inputs, outputs), self.ledger, commit=self._commit, facts=lambda: facts)

    def _loss(self, part: Any, program: Program, outputs: Sequence[Any]) -> Any:
        for position, output in program.signature.outputs_of(OutputKind.USER):
            if output.name == part.captured.loss_name:
                return outputs[position]
        return float("nan")

    def _request(self, buckets: tuple[UpdateBucket, ...]) -> UpdateRequest:
        options = self.builder.options
        clips = options.clip_grad_norm is not None
        return UpdateRequest(
            options.optimizer,
            buckets,
            clips,
            options.loss_scale,
            selects=self.ledger.decides_late,
            watches_fp8=self.state.fp8 is not None,
        )

    def _inputs(
        self, program: Program, view: ModelView, bound: BoundBatch | None, buckets: tuple[UpdateBucket, ...]
    ) -> list[Any]:
        tangent = None if self.state.scaler is None else self.state.scaler.tangent
        numbers = self.state.numbers(buckets)
        if self.builder.options.clip_grad_norm is not None:
            numbers[CLIP_SCALAR] = float(self.builder.options.clip_grad_norm)
        source = state_source(self.state, numbers, program.fp8.watch)
        return collect_inputs(program, view, bound, source, tangent=tangent)

    @contextmanager
    def _commit(self) -> Iterator[None]:
        """Everything inside happens, or the step is marked as broken."""
        with held_interrupts():
            try:
                yield
            except BaseException as error:
                self.broken = f"{type(error).__name__}: {error}"
                raise StateError(
                    f"a failure inside the update left parameters and state partly written ({self.broken}); load a "
                    "saved model and step.load_state_dict(...) before going on"
                ) from error

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise StateError(
                f"an earlier update failed half way ({self.broken}), so parameters may mix two steps: load a saved "
                "model and step.load_state_dict(...) first"
            )

    # ---- state ---------------------------------------------------------------------------------------------------

    @property
    def paging(self) -> PagingStatistics:
        """Whose optimizer state is paged, how much of it is where, and what has been moved."""
        return self.state.pager.store.statistics()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimizer as schedulers and loggers see it."""
        self.ledger.settle()
        return self.state.facade

    @property
    def last_update(self) -> Any:
        """What became of the last update: an ``UpdateInfo``, or None before the first."""
        return self.ledger.last

    @property
    def loss_scale(self) -> float | None:
        """What the loss of the next update is multiplied by; None without loss scaling."""
        return None if self.state.scaler is None else float(self.state.scaler.scale)

    def state_dict(self) -> dict[str, Any]:
        """Everything beside the model that a bit-exact resume needs; tensors are the live ones."""
        self.ledger.settle()
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a ``state_dict``; checked whole before anything changes. Random state is restored too."""
        self.state.follow(view_model(self.model).parameters)
        self.ledger.settle()
        self.state.load_state_dict(state)
        self.broken = None

    # ---- looking inside ------------------------------------------------------------------------------------------

    def report(self, *, measure: bool = False) -> Any:
        """The report of the step that ran last: passes, memory by class, peak predicted and (``measure``) measured."""
        from graphopt.report.step_report import step_report

        ran, state = self._ran(), self._state_rows()
        return step_report(ran, self.builder.options, measure=measure, notes=self._notes(), state=state)

    def explain(self, name: str) -> str:
        """What became of a module, parameter or value: where it comes from, when it lives, bytes, refusals."""
        from graphopt.report.explain import explain

        return explain(self._ran(), name, self._state_rows())

    @property
    def dumps(self) -> tuple[Path, ...]:
        """The folders that ``dump=`` filled, one a compiled graph, in order."""
        return tuple(self.builder.dump_folders)

    @property
    def source(self) -> str:
        """The Python that runs, as text."""
        return self._ran().source

    @property
    def program(self) -> Program:
        """The Program that ran last."""
        return self._ran().program

    def save(self, path: str | Path, **extra: Any) -> None:
        """Write model and step into one file; see ``graphopt.save_checkpoint``."""
        from graphopt.train.saving import save_checkpoint

        save_checkpoint(path, model=self.model, step=self, extra=extra)

    def _ran(self) -> Executable:
        if self.last_executable is None:
            raise StateError("nothing has been compiled yet: call step(**batch) once; the first batch is the example")
        return self.last_executable

    def _state_rows(self) -> tuple[StateRow, ...]:
        parts = self.parts.built.values()
        return state_rows(self.state, [name for part in parts for name in part[0].reached]) if parts else ()

    def _notes(self) -> tuple[str, ...]:
        paging = self.state.pager.store.notes()
        if not self.accumulates:
            return paging
        return paging + tuple(f"accumulation: {part[0].weight.reason}" for part in self.parts.built.values())


__all__ = ["BatchError", "TrainStep", "UpdateInfo"]
