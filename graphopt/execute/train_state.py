"""The state of training beside the parameters: optimizer state, counters, the accumulation window."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graphopt.capture.accumulation import window_spec
from graphopt.capture.loss_weight import LossWeight
from graphopt.capture.range_update import PAGES
from graphopt.capture.update_bucket import UPDATE_NUMBER, UpdateBucket, make_bucket
from graphopt.errors import StateError
from graphopt.execute.fp8_state import Fp8State, Seen, check_fp8_state
from graphopt.execute.loss_scaler import LossScaler, check_scaler_state, device_of
from graphopt.execute.master_watch import MasterWatch
from graphopt.execute.paging.state_pager import StatePager
from graphopt.execute.state_keeper import StateKeeper
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer, refuse_complex
from graphopt.optim.facade import OptimizerFacade, check_optimizer
from graphopt.optim.kept_state import MASTER, KeptState, copied_state, memory_order
from graphopt.optim.state import StateChoice, Weights

log = logging.getLogger(__name__)

FORMAT_VERSION = 1


@dataclass
class Window:
    """An open accumulation window: gradient sums by parameter, their weight and loss, micro-batches so far."""

    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    touched: dict[str, None] = field(default_factory=dict)
    weight: torch.Tensor | None = None
    loss: torch.Tensor | None = None
    micro_batches: int = 0
    divides: bool = True

    def tensor(self, name: str, spec: TensorSpec) -> torch.Tensor:
        """The gradient sum of parameter ``name``, zeros at first."""
        if name not in self.gradients:
            self.gradients[name] = zeros(spec)
        _refuse_other_spec("window gradient", name, self.gradients[name], spec)
        return self.gradients[name]

    def total(self, attribute: Literal["weight", "loss"], spec: TensorSpec) -> torch.Tensor:
        """The weight or the loss of the window, zero at first, on the device of ``spec``: files are loaded on a CPU."""
        found = getattr(self, attribute)
        found = zeros(spec) if found is None else found.to(spec.device)
        setattr(self, attribute, found)
        return found  # type: ignore[no-any-return]

    def clear(self) -> None:
        """Start an empty window in the same memory."""
        for tensor in self.gradients.values():
            tensor.zero_()
        for total in (self.weight, self.loss):
            if total is not None:
                total.zero_()
        self.touched.clear()
        self.micro_batches = 0


class TrainState:
    """Optimizer state in ``facade.state`` (torch's own form), step counts, window, counters."""

    def __init__(
        self,
        optimizer: Optimizer,
        parameters: Mapping[str, torch.nn.Parameter],
        *,
        weights: Weights = Weights.OWN,
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        """``aliases``: other names of tied parameters, to the names that ``parameters`` has them under."""
        self.optimizer = optimizer
        self.keeper = StateKeeper(optimizer, parameters, weights)
        self.choices = self.keeper.choices
        self.known = self.keeper.known
        self.facade = OptimizerFacade(optimizer, parameters, self.keeper, aliases)
        self.pager = StatePager(self.keeper, self.facade)
        self.masters = MasterWatch()
        self.window = Window()
        self.scaler: LossScaler | None = None
        self.fp8: Fp8State | None = None
        self.skipped = 0
        self.warned = False

    @property
    def updates(self) -> int:
        """How many updates there were; what is rounded by chance draws from this number."""
        return self.keeper.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self.keeper.updates = count

    @property
    def decides_on_device(self) -> bool:
        """Whether the compiled program decides if an update is applied: as loss scaling says, or else FP8."""
        if self.scaler is not None:
            return self.scaler.decides_on_device
        return self.fp8 is not None and self.fp8.decides_on_device(device_of(self.known.values()))

    @property
    def seen(self) -> tuple[Seen, ...]:
        """What the micro-steps of the open window quantized to FP8."""
        return () if self.fp8 is None else tuple(self.fp8.seen)

    def clear_window(self) -> None:
        """Start an empty window."""
        self.window.clear()
        if self.fp8 is not None:
            self.fp8.clear_window()

    def warn_unproven(self, weight: LossWeight) -> None:
        """Say once how the window counts where the graph of the loss does not prove that it equals the full batch."""
        if weight.is_proven or self.warned:
            return
        self.warned = True
        log.warning(
            "accumulation: %s. This may differ from one step on the full batch: pass Accumulate(reduction='mean' or "
            "'sum') to settle it, or Accumulate(weight=...) with the name of an output that counts the items",
            weight.reason,
        )

    def follow(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        """Take over parameters that were replaced or added since the last call."""
        for name, parameter in parameters.items():
            old = self.known.get(name)
            if old is parameter:
                continue
            if old is None:
                self.facade.add_param_group({"params": [parameter]})
            else:
                self.facade.replace_parameter(old, parameter)
            self.known[name] = parameter
        self.masters.follow(self.known, self.facade.state)
        if self.scaler is not None:
            self.scaler.follow(device_of(parameters.values()))

    def buckets(self, names: tuple[str, ...]) -> tuple[UpdateBucket, ...]:
        """``names`` grouped by parameter group and step count, as the graph needs them."""
        self.pager.decide(name for name, parameter in self.known.items() if parameter.requires_grad)
        members: dict[tuple[Any, ...], list[str]] = {}
        groups = {id(p): i for i, group in enumerate(self.facade.param_groups) for p in group["params"]}
        for name in names:
            parameter = self.known[name]
            refuse_complex(self.optimizer, name, parameter)
            group = groups.get(id(parameter))
            if group is None:
                raise StateError(f"parameter {name!r} belongs to no group of step.optimizer; add it to one")
            options = self.facade.param_groups[group]
            kept = self.choices.choice(name, parameter, options).format
            weights = self.choices.weights(name, parameter)
            key = (group, self._count(parameter), kept, weights, self.pager.is_paged(name))
            members.setdefault(key, []).append(name)
        return tuple(
            make_bucket(
                self.optimizer,
                self.facade.param_groups[group],
                name=str(position),
                parameters=tuple(inside),
                state_format=kept,
                weights=weights,
                is_paged=is_paged,
            )
            for position, ((group, _, kept, weights, is_paged), inside) in enumerate(members.items())
        )

    def choice(self, name: str) -> StateChoice:
        """In which format the state of parameter ``name`` is kept, and why."""
        return self.kept(name).choice

    def kept(self, name: str) -> KeptState:
        """How the state of parameter ``name`` is kept."""
        return self.keeper.kept(name, self._options_of(name))

    def near_bytes(self, names: Iterable[str]) -> int:
        """Bytes of the state of ``names`` that lies in ordinary memory."""
        return sum(self.kept(name).nbytes for name in names if not self.pager.is_paged(name))

    def _options_of(self, name: str) -> Mapping[str, Any]:
        return self.facade.param_groups[self.facade.group_of(self.known[name])]

    def numbers(self, buckets: tuple[UpdateBucket, ...]) -> dict[str, float]:
        """The numbers of this update by the names the graph knows: ``lr.0``, ``step.0``, ..."""
        values = {}
        for bucket in buckets:
            parameter = self.known[bucket.parameters[0]]
            options = self.facade.param_groups[self.facade.group_of(parameter)]
            count = self._count(parameter)
            found = self.optimizer.numbers(options, step=count + 1.0, first=count == 0)
            found[UPDATE_NUMBER] = float(self.updates + 1)
            values.update({f"{name}.{bucket.name}": found[name] for name in bucket.numbers})
        return values

    def tensor(self, state_name: str, name: str, spec: TensorSpec) -> torch.Tensor:
        """State ``state_name`` of parameter ``name``; at first zeros, or for a master copy the parameter."""
        state = self.facade.state[self.known[name]]
        if self.optimizer.counts_steps and "step" not in state:
            state["step"] = torch.tensor(0.0)
        if state_name == PAGES:
            return self.pager.pages(name, state)
        if state_name not in state:
            state[state_name] = zeros(spec)
            if state_name == MASTER:
                state[state_name].copy_(self.known[name].detach())
        _refuse_other_spec(f"state {state_name}", name, state[state_name], spec)
        return state[state_name]  # type: ignore[no-any-return]

    def advance(self, names: tuple[str, ...]) -> None:
        """Count an update of ``names``."""
        for name in names:
            state = self.facade.state[self.known[name]]
            if self.optimizer.counts_steps:
                state["step"] += 1
            elif "momentum_buffer" in state:
                state["updated"] = True
        self.masters.updated(names, self.known)
        self.updates += 1
        self.facade._opt_called = True

    def _count(self, parameter: torch.nn.Parameter) -> float:
        """Updates so far, as far as the rule needs to know."""
        state = self.facade.state.get(parameter) or {}
        if self.optimizer.counts_steps:
            return float(state["step"]) if "step" in state else 0.0
        return 1.0 if state.get("updated") else 0.0

    # ---- saving --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Everything a bit-exact resume needs, by parameter name."""
        return {
            "version": FORMAT_VERSION,
            "optimizer": type(self.optimizer).__name__,
            "state": {name: dict(self.facade.state[p]) for name, p in self.known.items() if p in self.facade.state},
            "formats": self.facade.formats(),
            "groups": [self._group_dict(group) for group in self.facade.param_groups],
            "window": {
                "gradients": {name: self.window.gradients[name] for name in self.window.touched},
                "weight": self.window.weight,
                "loss": self.window.loss,
                "micro_batches": self.window.micro_batches,
                "divides": self.window.divides,
            },
            "counters": {"updates": self.updates, "skipped": self.skipped},
            "random": _random_state(),
            **({} if self.scaler is None else {"loss_scale": self.scaler.state_dict()}),
            **({} if self.fp8 is None else {"fp8": self.fp8.state_dict()}),
        }

    def _group_dict(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self.known.items()}
        options = {key: value for key, value in group.items() if key != "params"}
        return {**options, "params": [names[id(parameter)] for parameter in group["params"]]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave. Everything is checked before anything is changed."""
        checked = self._check(saved)
        for name, (options, kept) in checked.items():
            self.keeper.settle(name, options, kept)
        self.pager.decide(saved["state"])
        self.pager.reserve(saved["state"])
        self.facade.state.clear()
        for name, values in saved["state"].items():
            # What is paged goes from where it is straight into its pages.
            paged = checked[name][1].specs if name in checked and self.pager.is_paged(name) else {}
            copied = copied_state({key: values[key] for key in values if key not in paged}, self.known[name])
            state = self.facade.state[self.known[name]] = {**values, **copied}
            if paged:
                self.pager.pages(name, state)
        for group, options in zip(self.facade.param_groups, saved["groups"], strict=True):
            group.update({key: _restored(value) for key, value in options.items() if key != "params"})
            group["params"] = [self.known[name] for name in options["params"]]
        self._load_window(saved["window"])
        self.updates = int(saved["counters"]["updates"])
        self.skipped = int(saved["counters"]["skipped"])
        if self.scaler is not None and saved.get("loss_scale") is not None:
            self.scaler.load_state_dict(saved["loss_scale"])
        if self.fp8 is not None:
            self.fp8.load_state_dict(saved.get("fp8"))
        _restore_random_state(saved["random"])

    def _load_window(self, window: Mapping[str, Any]) -> None:
        self.window = Window()
        for name, tensor in window["gradients"].items():
            self.window.gradients[name] = tensor.to(self.known[name].device, copy=True)
            self.window.touched[name] = None
        for total in ("weight", "loss"):
            if window[total] is not None:
                setattr(self.window, total, window[total].clone())
        self.window.micro_batches = int(window["micro_batches"])
        self.window.divides = bool(window["divides"])

    def _check(self, saved: Mapping[str, Any]) -> dict[str, tuple[Mapping[str, Any], KeptState]]:
        """The options and the kept state of each parameter that has a saved state."""
        expected = {"version", "optimizer", "state", "groups", "window", "counters", "random"}
        if not isinstance(saved, Mapping) or set(saved) - {"formats", "loss_scale", "fp8"} != expected:
            raise StateError(f"expected a state dict of a compiled step with {sorted(expected)}, came {_keys(saved)}")
        if saved["version"] != FORMAT_VERSION:
            raise StateError(f"the state has format version {saved['version']}, this graphopt reads {FORMAT_VERSION}")
        check_optimizer(saved["optimizer"], self.optimizer)
        if len(saved["groups"]) != len(self.facade.param_groups):
            raise StateError(
                f"the state has {len(saved['groups'])} parameter groups, the step {len(self.facade.param_groups)}"
            )
        options = {name: group for group in saved["groups"] for name in group["params"]}
        named = [name for group in saved["groups"] for name in group["params"]]
        if sorted(named) != sorted(self.known):
            missing, unknown = sorted(set(self.known) - set(named)), sorted(set(named) - set(self.known))
            raise StateError(f"parameters do not match the model: missing {missing}, unknown {unknown}")
        gradients = saved["window"]["gradients"]
        stray = sorted({*saved["state"], *gradients} - set(options))
        if stray:
            raise StateError(f"the state holds {stray}, which the model does not have")
        for name, gradient in gradients.items():
            _refuse_other_spec("window gradient", name, gradient, window_spec(TensorSpec.of(self.known[name])))
        check_scaler_state(saved, self.scaler)
        check_fp8_state(saved)
        formats = saved.get("formats", {})
        return {
            name: (options[name], self.keeper.check(name, options[name], values, formats.get(name)))
            for name, values in saved["state"].items()
            if values
        }


def _refuse_other_spec(what: str, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    """Raise StateError for a tensor that does not fit the parameter any more (the model was cast after a step).

    Of codes the order in memory counts too: their blocks follow it.
    """
    if tensor.dtype == spec.dtype and tuple(tensor.shape) == tuple(spec.shape):
        lies_alike = tensor.stride() == spec.stride or spec.dtype not in (torch.int8, torch.uint8)
        if lies_alike or memory_order(TensorSpec.of(tensor)) == memory_order(spec):
            return
        raise StateError(
            f"the 8-bit codes {what} of {name!r} have strides {list(tensor.stride())}, the parameter now needs "
            f"{list(spec.stride)}: give it the memory format back that it had, or compile a new step and carry the "
            "state over with graphopt.optim.import_state(step, old_step.optimizer.state_dict())"
        )
    raise StateError(
        f"{what} of {name!r} is {TensorSpec.of(tensor)}, the parameter now needs {spec}: its dtype or its group's "
        "'state' was changed after a step. Change it back, or compile a new step and carry the state over with "
        "graphopt.optim.import_state(step, old_step.optimizer.state_dict())"
    )


def zeros(spec: TensorSpec) -> torch.Tensor:
    """A zero tensor of ``spec``."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _keys(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__


def _restored(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def _restore_random_state(state: Mapping[str, Any]) -> None:
    torch.set_rng_state(state["cpu"].cpu())
    if "cuda" in state and torch.cuda.is_available():
        # What was saved beside eight devices may go on beside one.
        for index, tensor in enumerate(state["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(tensor.cpu(), index)
