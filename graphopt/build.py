"""From a model and a batch to executables: capture -> passes -> differentiate -> passes -> update -> passes -> emit."""

from __future__ import annotations

import gc
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from graphopt.capture.accumulation import append_window
from graphopt.capture.batch import BatchBinder, BoundBatch
from graphopt.capture.differentiate import differentiable_outputs, differentiate, without_gradient
from graphopt.capture.export import Captured, OutputRequest, capture_program
from graphopt.capture.fp8_scaling import read_history, watch_module, watch_step
from graphopt.capture.loss_weight import LossWeight, find_loss_weight
from graphopt.capture.update import UpdateRequest, append_update, window_update_program
from graphopt.capture.window_weights import split_weights
from graphopt.checkpoint import host_bytes
from graphopt.errors import BudgetError, OutputError, UnsupportedError
from graphopt.execute.backend import ATEN, Backend, choose_backend
from graphopt.execute.executable import Executable, build_executable
from graphopt.execute.far_memory import FarMemory
from graphopt.execute.model_view import view_model
from graphopt.execute.paging.rules import install_rules
from graphopt.execute.shared_memory import overlapping_tensors
from graphopt.execute.workspace import MeasuredWorkspace
from graphopt.ir.ambient import without_autocast
from graphopt.ir.embeddings import embedding_tables
from graphopt.ir.fp8_table import Fp8Table
from graphopt.ir.fp8_trained import NOTHING_TRAINED
from graphopt.ir.hazards import protect_backward_reads, separate_updates
from graphopt.ir.liveness import plan_memory
from graphopt.ir.program import Program, Stage
from graphopt.ir.spec import UPDATE_KINDS, OutputKind, TensorSpec
from graphopt.ir.units import format_bytes
from graphopt.optim.base import Optimizer
from graphopt.options import CompileOptions
from graphopt.pipeline.default import default_pipeline, with_less_room, with_micro_steps
from graphopt.pipeline.dump import Dump
from graphopt.pipeline.pipeline import Pipeline
from graphopt.planner.decide import MemoryRequest
from graphopt.planner.fp8_devices import device_class
from graphopt.precision import FULL, Precision, precision_for
from graphopt.report.build import build_report

_MOST_PLANS = 4
"""How often a step is planned anew because its backend needs more than the plan says."""


@dataclass(frozen=True)
class BuiltGradient:
    """A joint Program with how to rebuild the user's outputs, and how the loss counts in a window."""

    captured: Captured
    joint: Program
    weight: LossWeight
    dump: Dump | None
    differentiable: tuple[str, ...] = ()

    @property
    def reached(self) -> tuple[str, ...]:
        """Names of the inputs that have a gradient."""
        return tuple(output.name for _, output in self.joint.signature.outputs_of(OutputKind.GRAD))

    @property
    def embeddings(self) -> tuple[str, ...]:
        """Names of the parameters whose rows are looked up."""
        return embedding_tables(self.captured.program)


@dataclass(frozen=True)
class BuiltMicroStep:
    """``executable`` runs one micro-batch; ``weights`` what it needs once a window: weights in FP8. None: nothing."""

    executable: Executable
    weights: Executable | None


class Builder:
    """Builds executables for one model under one set of options."""

    def __init__(self, model: torch.nn.Module, options: CompileOptions) -> None:
        self.model = model
        self.options = options
        self.request = OutputRequest(options.outputs, options.loss, require_loss=options.optimizer is not None)
        self.binder = BatchBinder(model, allow_extra=callable(options.loss))
        self.precision = precision_for(model, options.precision)
        if self.precision.fp8 is not None and self.precision.fp8.target is not None:
            device_class(self.precision.fp8.target)  # before any batch: a name that is no device's is an error
        self.workspace = MeasuredWorkspace()
        self.dump_folders: list[Path] = []
        self._trained = NOTHING_TRAINED
        self._weight_programs: dict[str, Executable] = {}

    def is_current(self, evaluation: Program) -> bool:
        """Whether ``evaluation`` has the FP8 products that it would have if it were compiled now, after training."""
        return evaluation.fp8.follows(self._trained)

    def pipeline(self, stage: Stage, reserved_bytes: int = 0, margin_bytes: int = 0) -> Pipeline:
        """The passes of a stage: the default ones unless options name others."""
        if self.options.passes is None:
            request = MemoryRequest(self.options.checkpoint, self.options.memory, reserved_bytes, margin_bytes)
            pipeline = default_pipeline(stage, request, self.precision)
        else:
            given = self.options.passes[(Stage.FORWARD, Stage.JOINT, Stage.STEP).index(stage)]
            pipeline = with_less_room(given, reserved_bytes=reserved_bytes, margin_bytes=margin_bytes)
        pipeline = with_micro_steps(pipeline, self.options.accumulate.steps)
        if self.options.release_gradients and not self._shared():
            return pipeline
        # Ordering may let a late gradient wait until behind the first update, which must then stand at the end.
        return pipeline.without("release-gradients").without("order-for-lifetime")

    def _shared(self) -> tuple[str, ...]:
        """Parameters that overlap with other tensors of the model: all updates stand at the end, in order."""
        return overlapping_tensors(view_model(self.model))

    def run_passes(
        self, program: Program, stage: Stage, dump: Dump | None, pipeline: Pipeline | None = None
    ) -> Program:
        """``program`` after the passes of ``stage`` (or those of ``pipeline``)."""
        self.workspace.learn(program)
        return (pipeline or self.pipeline(stage)).run(
            program,
            verify=self.options.verify,
            workspace=self.workspace,
            observer=dump.observe if dump is not None else None,
        )

    def capture(self, batch: BoundBatch, *, title: str) -> tuple[Captured, Dump | None]:
        """The forward Program after its passes."""
        captured = capture_program(self.model, batch, self.request)  # under the user's autocast, which it records
        dump = Dump(self.options.dump, title) if self.options.dump is not None else None
        if dump is not None:
            dump.start(captured.program)
        with without_autocast():
            program = self.run_passes(captured.program, Stage.FORWARD, dump)
        if dump is not None and program.precision.rows:
            dump.attach("precision.txt", program.precision.text())
        return replace(captured, program=program), dump

    def gradient(self, batch: BoundBatch, *, wrt: Sequence[str], title: str) -> BuiltGradient:
        """The joint Program after its passes; the loss is differentiated, or every output when there is no loss."""
        captured, dump = self.capture(batch, title=title)
        with without_autocast():
            return self._differentiated(captured, dump, wrt)

    def _differentiated(self, captured: Captured, dump: Dump | None, wrt: Sequence[str]) -> BuiltGradient:
        roots = _roots(captured.program, captured.loss_name, wrt)
        joint = differentiate(captured.program, roots=roots, wrt=wrt)
        if dump is not None:
            dump.mark("joint", joint)
        joint = self.run_passes(joint, Stage.JOINT, dump)
        self._trained = self._trained.with_decisions(joint.fp8.forward_decisions())
        if dump is not None and joint.fp8.rows:
            dump.attach("fp8.txt", joint.fp8.text())
        joint = self._watched(joint)
        differentiable = () if self.options.optimizer else differentiable_outputs(captured.program, wrt=wrt)
        return BuiltGradient(captured, joint, self._weight(joint, captured.loss_name), dump, differentiable)

    def _watched(self, joint: Program) -> Program:
        """``joint`` with what FP8 remembers and looks at; as it is where no recipe was asked for."""
        recipe = self.options.precision.fp8
        if recipe is None:
            return joint
        if self.options.optimizer is None:
            return watch_module(joint, recipe)
        looks_anyway = self.options.clip_grad_norm is not None or self.options.loss_scale is not None
        return watch_step(joint, recipe, gradients=not looks_anyway)

    def _weight(self, joint: Program, loss: str | None) -> LossWeight:
        accumulate = self.options.accumulate
        if loss is None or accumulate.steps == 1 or accumulate.reduction == "mean":
            return LossWeight(1.0, "micro-batches count equally, as asked for")
        if accumulate.reduction == "sum":
            return LossWeight(None, "gradients of the window are summed, as asked for")
        if accumulate.weight is not None:
            return LossWeight(joint.output_named(accumulate.weight), f"output {accumulate.weight!r} is the weight")
        return find_loss_weight(joint, loss)

    def step(self, built: BuiltGradient, request: UpdateRequest) -> Executable:
        """Forward, backward and update in one program."""
        program = append_update(built.joint, request)
        return self._finish(program, built.dump, title="step")

    def micro_step(self, built: BuiltGradient, *, reserved_bytes: int) -> BuiltMicroStep:
        """Forward and backward, gradients added to the window; ``reserved_bytes`` rest beside it."""
        assert built.captured.loss_name is not None, "accumulation needs a loss"
        split = split_weights(built.joint) if self.options.precision.fp8 is not None else None
        joint = built.joint if split is None else split.joint
        program = append_window(joint, loss=built.captured.loss_name, weight=built.weight.weight)
        executable = self._finish(program, built.dump, title="micro-step", reserved_bytes=reserved_bytes)
        return BuiltMicroStep(executable, None if split is None else self._window_weights(split.weights))

    def _window_weights(self, program: Program) -> Executable:
        """What quantizes weights when a window is opened: one for all batch signatures that need the same."""
        text = program.text()
        if text not in self._weight_programs:
            dump = Dump(self.options.dump, "window-weights") if self.options.dump is not None else None
            passes = default_pipeline(Stage.STEP)  # no memory policy: it runs where little else is held
            self._weight_programs[text] = self._executable(program, dump, "window-weights", passes)
            if dump is not None:
                self._conclude(dump, self._weight_programs[text])
        return self._weight_programs[text]

    def window_update(
        self, parameters: Mapping[str, TensorSpec], request: UpdateRequest, *, divide: bool
    ) -> Executable:
        """The update that ends a window."""
        program = window_update_program(parameters, request, divide=divide)
        dump = Dump(self.options.dump, "window-update") if self.options.dump is not None else None
        return self._finish(program, dump, title="window-update")

    def module_step(self, built: BuiltGradient) -> Executable:
        """Forward and backward whose gradients are outputs."""
        program = built.joint.copy()
        program.stage = Stage.STEP
        protect_backward_reads(program)
        return self._finish(program, built.dump, title="forward-backward")

    def evaluation(self, batch: BoundBatch) -> tuple[Captured, Executable]:
        """The forward alone, without any update."""
        captured, dump = self.capture(batch, title="eval")
        program = self._inference_program(captured, dump)
        kept = [
            (value, output)
            for value, output in zip(program.output_values(), program.signature.outputs, strict=True)
            if output.kind not in UPDATE_KINDS
        ]
        program.set_outputs([value for value, _ in kept], [output for _, output in kept])
        return captured, self._finish(program, dump, title="eval")

    def inference(self, batch: BoundBatch) -> tuple[Captured, Executable]:
        """The forward alone, with the buffer updates it makes in this mode."""
        captured, dump = self.capture(batch, title="forward")
        return captured, self._finish(self._inference_program(captured, dump), dump, title="forward")

    def _inference_program(self, captured: Captured, dump: Dump | None) -> Program:
        """The forward alone, its products as training has them, ready for the passes of a step."""
        is_fp8 = self.options.precision.fp8 is not None
        program = self._inference_in_fp8(captured.program, dump) if is_fp8 else captured.program.copy()
        program.stage = Stage.STEP
        return program

    def _inference_in_fp8(self, forward: Program, dump: Dump | None) -> Program:
        """``forward`` as a joint program without gradients, which what decides about products is written for."""
        recipe = self.options.precision.fp8
        assert recipe is not None, "asked for FP8"
        wrt = [name for name, parameter in view_model(self.model).parameters.items() if parameter.requires_grad]
        with without_autocast():
            program = without_gradient(forward, wrt=wrt)
            program.fp8 = Fp8Table(trained=self._trained)
            program = read_history(self.run_passes(program, Stage.JOINT, dump), recipe)
        if dump is not None and program.fp8.rows:
            dump.attach("fp8.txt", program.fp8.text())
        return program

    def _far_memory(self) -> FarMemory | None:
        """The host memory that the Offload policy allows; None without one."""
        policy = MemoryRequest(self.options.checkpoint).offload
        if policy is None:
            return None
        budget = None if policy.host_budget is None else host_bytes(policy.host_budget)
        return FarMemory(budget=budget, pin=policy.pin)

    def _finish(self, program: Program, dump: Dump | None, *, title: str, reserved_bytes: int = 0) -> Executable:
        separate_updates(program)
        if dump is not None:
            dump.mark(title, program)
        with without_autocast():
            install_rules(program, self._range_executable)
            executable = self._within_budget(program, dump, title, reserved_bytes)
        gc.collect()  # tracing leaves reference cycles behind, with fake and real tensors in them
        if dump is not None:
            self._conclude(dump, executable)
        return executable

    def _conclude(self, dump: Dump, executable: Executable) -> None:
        self.dump_folders.append(dump.finish(executable.source, build_report(executable)))

    def _range_executable(self, program: Program) -> Executable:
        """What updates one range of a parameter whose state is paged."""
        passes = default_pipeline(Stage.STEP)
        return build_executable(self.run_passes(program, Stage.STEP, None, passes), title="range update")

    def _within_budget(self, program: Program, dump: Dump | None, title: str, reserved_bytes: int) -> Executable:
        """An executable that holds its budget: if the backend needs more than was planned, with that much less."""
        margin_bytes = 0
        for _ in range(_MOST_PLANS):
            passes = self.pipeline(Stage.STEP, reserved_bytes, margin_bytes)
            executable = self._executable(program, dump, title, passes)
            budget, plan = executable.program.decisions.budget_bytes, executable.plan
            needed = plan.peak_bytes + plan.resident_bytes + reserved_bytes
            if budget is None or needed <= budget:
                return executable
            margin_bytes += needed - budget
        raise BudgetError(
            f"the budget cannot be met: {executable.backend.name} needs {format_bytes(needed)} ({needed} bytes) for "
            "the best plan found; allow that much",
            needed,
        )

    def _aten(self) -> Backend:
        return ATEN if self.options.backend == "aten" else Backend("aten", "auto: parameters overlap in memory")

    def _refuse_shared(self) -> None:
        """Raise UnsupportedError for overlapping parameters: a region writes several as if they were apart."""
        shared = self._shared()
        if shared:
            raise UnsupportedError(
                f"backend='inductor' expects parameters with memory of their own, but {', '.join(shared)} overlap: use "
                "one torch.nn.Parameter for both, or backend='aten'"
            )

    def _executable(self, program: Program, dump: Dump | None, title: str, passes: Pipeline) -> Executable:
        """``program`` after the step ``passes``, on the backend that was asked for or chosen."""
        far_memory = self._far_memory()
        if self.options.backend == "aten" or (self.options.backend == "auto" and self._shared()):
            in_place = self.run_passes(program, Stage.STEP, dump, passes)
            return build_executable(in_place, title=title, far_memory=far_memory, backend=self._aten())
        self._refuse_shared()
        functional = self.run_passes(program, Stage.STEP, dump, Pipeline(tuple(p for p in passes if not p.in_place)))
        backend = choose_backend(self.options.backend, functional)
        last = Pipeline(tuple(item for item in passes if item.in_place))
        in_place = self.run_passes(functional, Stage.STEP, dump if backend.name == "aten" else None, last)
        if backend.name == "aten":
            return build_executable(in_place, title=title, far_memory=far_memory, backend=backend)
        from graphopt.execute.inductor import compile_regions  # late: importing Inductor takes a second

        compiled = compile_regions(functional, most_bytes=plan_memory(in_place, workspace=self.workspace).peak_bytes)
        if dump is not None:
            dump.mark("inductor", compiled.program)
            dump.attach("regions.txt", compiled.text)
        backend = replace(backend, notes=compiled.notes)
        return build_executable(compiled.program, title=title, far_memory=far_memory, backend=backend)


def _roots(program: Program, loss: str | None, wrt: Sequence[str]) -> Sequence[str]:
    """The loss, or without one every output that has a gradient."""
    if loss is not None:
        return (loss,)
    found = differentiable_outputs(program, wrt=wrt)
    if not found:
        there = [output.name for _, output in program.signature.outputs_of(OutputKind.USER)]
        raise OutputError(f"none of the outputs {there} has a gradient with respect to a trainable parameter")
    return found


def training_program(
    model: torch.nn.Module,
    batch: Any,
    *,
    outputs: Sequence[str] | None = None,
    loss: Any = None,
    optimizer: Optimizer | None = None,
    precision: Precision = FULL,
) -> Program:
    """The joint Program of ``model`` on ``batch`` before any joint pass; forward passes have run."""
    bound = bind_batch(model, batch, allow_extra=callable(loss))
    request = OutputRequest(None if outputs is None else tuple(outputs), loss, require_loss=optimizer is not None)
    captured = capture_program(model, bound, request)
    _refuse_constants_without_values(captured.program)
    program = default_pipeline(Stage.FORWARD, precision=precision).run(captured.program)
    wrt = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    return differentiate(program, roots=_roots(program, captured.loss_name, wrt), wrt=wrt)


def _refuse_constants_without_values(program: Program) -> None:
    """Raise UnsupportedError for constants on the meta device: passes read what masks and tables hold."""
    empty = [node.name for node in program.constants() if program.constant(node).is_meta]
    if empty:
        raise UnsupportedError(
            f"expected constants with values, but {', '.join(empty)} of the captured model are on the meta device, and "
            "what masks hold decides what runs: build the model on the CPU (a few of its layers are enough)"
        )


def bind_batch(model: torch.nn.Module, batch: Any, *, allow_extra: bool = False) -> BoundBatch:
    """A dict as keywords, a tuple or list as positions, one tensor as the only argument."""
    binder = BatchBinder(model, allow_extra=allow_extra)
    if isinstance(batch, torch.Tensor):
        return binder.bind((batch,), {})
    if isinstance(batch, Mapping):
        return binder.bind((), dict(batch))
    return binder.bind(tuple(batch), {})
