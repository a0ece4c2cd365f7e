"""The state of training beside the parameters: optimizer state, counters, the accumulation window."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graphopt.capture.loss_weight import LossWeight
from graphopt.capture.page_layout import PageLayout, layout_of
from graphopt.capture.range_update import PAGES, pages_layout
from graphopt.capture.update_bucket import MASTER, UPDATE_NUMBER, UpdateBucket, make_bucket
from graphopt.errors import StateError
from graphopt.execute.loss_scaler import LossScaler, check_scaler_state
from graphopt.execute.paging.store import PageStore
from graphopt.execute.state_checks import check_state
from graphopt.execute.state_choices import StateChoices
from graphopt.ir.spec import TensorSpec
from graphopt.optim.base import Optimizer, refuse_complex
from graphopt.optim.facade import OptimizerFacade
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
        self, optimizer: Optimizer, parameters: Mapping[str, torch.nn.Parameter], *, weights: Weights = Weights.OWN
    ) -> None:
        self.optimizer = optimizer
        self.choices = StateChoices(optimizer, weights)
        self.facade = OptimizerFacade(optimizer, parameters)
        self.paging = PageStore(optimizer)
        self.layouts: dict[str, PageLayout] = {}
        if self.paging.is_on:
            me = weakref.ref(self)  # the facade outlives nothing of a step
            self.facade.register_load_state_dict_post_hook(lambda _: _repage(me()))
        self.known = dict(parameters)
        self.window = Window()
        self.scaler: LossScaler | None = None
        self.updates = 0
        self.skipped = 0
        self.warned = False

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

    def buckets(self, names: tuple[str, ...]) -> tuple[UpdateBucket, ...]:
        """``names`` grouped by parameter group and step count, as the graph needs them."""
        self._decide_paging()
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
            key = (group, self._count(parameter), kept, weights, self.paging.is_paged(name))
            members.setdefault(key, []).append(name)
        buckets = tuple(
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
        for bucket in buckets:
            if bucket.is_paged:
                specs = {name: TensorSpec.of(self.known[name]) for name in bucket.parameters}
                self.layouts.update({name: pages_layout(bucket, spec) for name, spec in specs.items()})
        return buckets

    def near_bytes(self, names: tuple[str, ...]) -> int:
        """Bytes of the state of ``names`` that lies in ordinary memory."""
        return sum(
            bucket.state_bytes(TensorSpec.of(self.known[name]))
            for bucket in self.buckets(names)
            for name in bucket.parameters
            if not bucket.is_paged
        )

    def _decide_paging(self) -> None:
        """Decide for all trainable parameters at once which of them keep their state in ordinary memory."""
        trained = {name: parameter for name, parameter in self.known.items() if parameter.requires_grad}
        sizes = {}
        for name in self.paging.undecided(trained):
            parameter, options = trained[name], self.facade.param_groups[self.facade.group_of(trained[name])]
            kept, weights = self.choice(name).format, self.choices.weights(name, parameter)
            bucket = make_bucket(
                self.optimizer, options, name="", parameters=(name,), state_format=kept, weights=weights
            )
            sizes[name] = bucket.state_bytes(TensorSpec.of(parameter))
        self.paging.decide(sizes, trained)

    def choice(self, name: str) -> StateChoice:
        """In which format the state of parameter ``name`` is kept, and why."""
        parameter = self.known[name]
        options = self.facade.param_groups[self.facade.group_of(parameter)]
        return self.choices.choice(name, parameter, options)

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
            return self._pages(name, state)
        if state_name not in state:
            state[state_name] = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
            self._fill(name, state_name, state[state_name])
        _refuse_other_spec(f"state {state_name}", name, state[state_name], spec)
        return state[state_name]  # type: ignore[no-any-return]

    def _fill(self, name: str, state_name: str, tensor: torch.Tensor) -> None:
        """What a state tensor holds before the first update."""
        if state_name == MASTER:
            tensor.copy_(self.known[name].detach())
        else:
            tensor.zero_()

    def _pages(self, name: str, state: dict[str, Any]) -> torch.Tensor:
        """The pages of ``name``, with all that ``state`` holds of it in them."""
        parameter, layout = self.known[name], self.layouts[name]
        for slot in layout.slots:
            if slot.name in state:
                _refuse_other_spec(f"state {slot.name}", name, state[slot.name], slot.spec(TensorSpec.of(parameter)))
        return self.paging.page_in(name, layout, parameter, state, lambda slot, tensor: self._fill(name, slot, tensor))

    def advance(self, names: tuple[str, ...]) -> None:
        """Count an update of ``names``."""
        for name in names:
            state = self.facade.state[self.known[name]]
            if self.optimizer.counts_steps:
                state["step"] += 1
            elif "momentum_buffer" in state:
                state["updated"] = True
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
        }

    def _group_dict(self, group: Mapping[str, Any]) -> dict[str, Any]:
        names = {id(parameter): name for name, parameter in self.known.items()}
        options = {key: value for key, value in group.items() if key != "params"}
        return {**options, "params": [names[id(parameter)] for parameter in group["params"]]}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` gave. Everything is checked before anything is changed."""
        self._check(saved)
        self._decide_by_size(saved["state"])
        paged = {name: values for name, values in saved["state"].items() if self.paging.is_paged(name)}
        self._reserve(paged)
        self.facade.state.clear()
        for name, values in saved["state"].items():
            parameter = self.known[name]
            # What is paged is copied straight into its pages, never whole into ordinary memory.
            there = _paged_part(values) if name in paged else {}
            copied = {key: _copied(value, parameter) for key, value in values.items() if key not in there}
            self.facade.state[parameter] = {**values, **copied}
            if name in paged:
                self._pages(name, self.facade.state[parameter])
        for group, options in zip(self.facade.param_groups, saved["groups"], strict=True):
            group.update({key: _restored(value) for key, value in options.items() if key != "params"})
            group["params"] = [self.known[name] for name in options["params"]]
        self._load_window(saved["window"])
        self.updates = int(saved["counters"]["updates"])
        self.skipped = int(saved["counters"]["skipped"])
        if self.scaler is not None and saved.get("loss_scale") is not None:
            self.scaler.load_state_dict(saved["loss_scale"])
        _restore_random_state(saved["random"])

    def _page_loaded(self) -> None:
        """Page what was loaded through ``facade`` alone, as torch does it: into new tensors."""
        loaded = {name: self.facade.state[p] for name, p in self.known.items() if p in self.facade.state}
        self._decide_by_size(loaded)
        paged = {name: values for name, values in loaded.items() if self.paging.is_paged(name)}
        self._reserve(paged)
        for name, values in paged.items():
            self._pages(name, values)

    def _decide_by_size(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Decide what is paged from state that is there, before a first step has said what there will be."""
        sizes = {
            name: sum(tensor.nbytes for tensor in _paged_part(states[name]).values())
            for name in self.paging.undecided(states)
        }
        self.paging.decide(sizes, self.known)

    def _reserve(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Make room for all of ``states`` before anything is changed."""
        block_format = getattr(self.optimizer, "block_format", None)
        for name, values in states.items():
            parameter = self.known[name]
            block = 1 if block_format is None else block_format.block
            self.layouts[name] = layout_of(_paged_part(values), TensorSpec.of(parameter), block)
            self.paging.reserve(name, self.layouts[name], parameter)

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

    def _check(self, saved: Mapping[str, Any]) -> None:
        expected = {"version", "optimizer", "state", "groups", "window", "counters", "random"}
        if not isinstance(saved, Mapping) or set(saved) - {"loss_scale"} != expected:
            raise StateError(f"expected a state dict of a compiled step with {sorted(expected)}, came {_keys(saved)}")
        if saved["version"] != FORMAT_VERSION:
            raise StateError(f"the state has format version {saved['version']}, this graphopt reads {FORMAT_VERSION}")
        if saved["optimizer"] != type(self.optimizer).__name__:
            raise StateError(
                f"the state belongs to {saved['optimizer']}, but the step was compiled with "
                f"{type(self.optimizer).__name__}"
            )
        if len(saved["groups"]) != len(self.facade.param_groups):
            raise StateError(
                f"the state has {len(saved['groups'])} parameter groups, the step {len(self.facade.param_groups)}"
            )
        named = [name for group in saved["groups"] for name in group["params"]]
        if sorted(named) != sorted(self.known):
            missing, unknown = sorted(set(self.known) - set(named)), sorted(set(named) - set(self.known))
            raise StateError(f"parameters do not match the model: missing {missing}, unknown {unknown}")
        for name, values in saved["state"].items():
            self._check_state(name, values)
        check_scaler_state(saved, self.scaler)

    def _check_state(self, name: str, values: Mapping[str, Any]) -> None:
        parameter = self.known.get(name)
        if parameter is None:
            raise StateError(f"the state holds {name!r}, which the model does not have")
        check_state(name, values, TensorSpec.of(parameter), self.optimizer)


def _refuse_other_spec(what: str, name: str, tensor: torch.Tensor, spec: TensorSpec) -> None:
    """Raise StateError for a tensor that does not fit the parameter any more (the model was cast after a step)."""
    if tensor.dtype == spec.dtype and tuple(tensor.shape) == tuple(spec.shape):
        return
    raise StateError(
        f"{what} of {name!r} is {TensorSpec.of(tensor)}, the parameter now needs {spec}: cast the state as the "
        "parameter was, or compile a new step"
    )


def zeros(spec: TensorSpec) -> torch.Tensor:
    """A zero tensor of ``spec``."""
    return torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device).zero_()


def _keys(value: object) -> object:
    return sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__


def _copied(value: Any, parameter: torch.Tensor) -> Any:
    """A tensor as it was, in the parameter's memory layout and on its device; step counts stay where they are."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.shape != parameter.shape:
        return value.clone() if value.dim() == 0 else value.to(parameter.device, copy=True)
    return torch.empty_like(parameter, dtype=value.dtype, requires_grad=False).copy_(value)


def _repage(state: TrainState | None) -> None:
    if state is not None:
        state._page_loaded()


def _paged_part(values: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of a parameter's state that are paged where its state is; the count of steps is not."""
    return {key: value for key, value in values.items() if isinstance(value, torch.Tensor) and key != "step"}


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
        torch.cuda.set_rng_state_all([tensor.cpu() for tensor in state["cuda"]])
