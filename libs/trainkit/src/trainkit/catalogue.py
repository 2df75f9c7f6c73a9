"""The one map from names to classes: what a configuration may name, and with which arguments.

A name stands for a class of one kind (`optimizer`, `schedule`, ...). It is short and listed here (`AdamW`), or a dotted
path into a package that the kind trusts (`torch.optim.AdamW`), or what the program itself registered. Paths come from
files, so they are checked three times: the module before it is imported, then the resolved object: a class of the kind,
and itself *defined* in a trusted package. An alias that leads elsewhere resolves, and is refused.

Names and arguments of the listed classes are known without importing them: a file can be checked without torch.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from trainkit.errors import InvalidSetup
from trainkit.extras import require


@dataclass(frozen=True, slots=True)
class Argument:
    """One argument of a listed class; `type` is a key of `_TYPES`."""

    name: str
    type: str = "number"
    required: bool = False


@dataclass(frozen=True, slots=True)
class Entry:
    """One listed class.

    `target` is `module:Class`, or the class itself when the program registered it. `arguments` is None when only the
    class can tell them.
    """

    target: str | type
    arguments: Mapping[str, Argument] | None = None


@dataclass(slots=True)
class Kind:
    """What one sort of component is: its base class, the packages it is trusted from, and the names for it."""

    noun: str
    base: str
    homes: list[str]
    entries: dict[str, Entry] = field(default_factory=dict)


class UnknownName(InvalidSetup):
    """A name or path that stands for nothing, or for something that is not allowed."""

    def __init__(self, problem: str, allowed: str = "", suggestion: str = "") -> None:
        self.problem, self.allowed, self.suggestion = problem, allowed, suggestion
        text = problem + (f"; allowed: {allowed}" if allowed else "")
        super().__init__(text + (f"; did you mean {suggestion}?" if suggestion else ""))


class WrongArguments(InvalidSetup):
    """Arguments that a class does not take. `problems`: (argument, message, what is allowed, suggestion) for each."""

    def __init__(self, name: str, problems: list[tuple[str, str, str, str]]) -> None:
        self.problems = problems
        lines = [
            f"{name}: {argument}: {message}"
            + (f"; allowed: {allowed}" if allowed else "")
            + (f"; did you mean {nearest}?" if nearest else "")
            for argument, message, allowed, nearest in problems
        ]
        super().__init__("\n".join(lines))


# Each word is an argument: `name`, `name:type` (number unless said), `!` when it must be given.
_OPTIMIZERS = {
    "ASGD": "lr lambd alpha t0 weight_decay foreach:flag maximize:flag differentiable:flag capturable:flag",
    "Adadelta": "lr rho eps weight_decay foreach:flag capturable:flag maximize:flag differentiable:flag",
    "Adafactor": "lr eps:pair clip_threshold decay_rate beta1 weight_decay scale_parameter:flag relative_step:flag "
    "warmup_init:flag",
    "Adagrad": "lr lr_decay weight_decay initial_accumulator_value eps foreach:flag maximize:flag differentiable:flag "
    "fused:flag",
    "Adam": "lr betas:pair eps weight_decay amsgrad:flag foreach:flag maximize:flag capturable:flag "
    "differentiable:flag fused:flag decoupled_weight_decay:flag",
    "AdamW": "lr betas:pair eps weight_decay amsgrad:flag maximize:flag foreach:flag capturable:flag "
    "differentiable:flag fused:flag",
    "Adamax": "lr betas:pair eps weight_decay foreach:flag maximize:flag differentiable:flag capturable:flag",
    "NAdam": "lr betas:pair eps weight_decay momentum_decay decoupled_weight_decay:flag foreach:flag maximize:flag "
    "capturable:flag differentiable:flag",
    "RAdam": "lr betas:pair eps weight_decay decoupled_weight_decay:flag foreach:flag maximize:flag capturable:flag "
    "differentiable:flag",
    "RMSprop": "lr alpha eps weight_decay momentum centered:flag capturable:flag foreach:flag maximize:flag "
    "differentiable:flag",
    "Rprop": "lr etas:pair step_sizes:pair capturable:flag foreach:flag maximize:flag differentiable:flag",
    "SGD": "lr momentum dampening weight_decay nesterov:flag maximize:flag foreach:flag differentiable:flag fused:flag",
    "SparseAdam": "lr betas:pair eps maximize:flag",
}

_TORCH_SCHEDULES = {
    "CosineAnnealingLR": "T_max:count! eta_min last_epoch:count",
    "CosineAnnealingWarmRestarts": "T_0:count! T_mult:count eta_min last_epoch:count",
    "CyclicLR": "base_lr! max_lr! step_size_up:count step_size_down:count mode:text gamma scale_fn:any scale_mode:text "
    "cycle_momentum:flag base_momentum max_momentum last_epoch:count",
    "ExponentialLR": "gamma! last_epoch:count",
    "LinearLR": "start_factor end_factor total_iters:count last_epoch:count",
    "OneCycleLR": "max_lr! total_steps:count epochs:count steps_per_epoch:count pct_start anneal_strategy:text "
    "cycle_momentum:flag base_momentum max_momentum div_factor final_div_factor three_phase:flag last_epoch:count",
    "StepLR": "step_size:count! gamma last_epoch:count",
}

_OWN_SCHEDULES = {
    "Constant": "last_epoch:count",
    "ConstantWithWarmup": "num_warmup_steps:count! last_epoch:count",
    "CosineWithHardRestartsWithWarmup": "num_warmup_steps:count! num_training_steps:count! num_cycles:count "
    "last_epoch:count",
    "CosineWithWarmup": "num_warmup_steps:count! num_training_steps:count! num_cycles last_epoch:count",
    "InverseSQRT": "num_warmup_steps:count! timescale:count last_epoch:count",
    "LinearWithWarmup": "num_warmup_steps:count! num_training_steps:count! last_epoch:count",
    "PolynomialDecayWithWarmup": "num_warmup_steps:count! num_training_steps:count! lr_end power last_epoch:count",
}

_TRACKERS = {
    "Csv": "path:text capacity:count interval_s",
    "JsonLines": "path:text capacity:count interval_s",
    "MLflow": "uri:text experiment:text run_name:text tags:any artifacts:text capacity:count interval_s",
    "TensorBoard": "folder:text capacity:count interval_s",
    "Yard": "",
}

_CALLBACKS = {
    "EMA": "decay every:count warm_up:flag evaluate:flag",
    "EarlyStopping": "rule:text mode:text patience:count min_delta",
    "KeepBest": "rule:text folder:text mode:text max_shard_bytes:count",
    "Monitor": "every:text learning_rate:flag grad_norm:flag throughput:flag memory:flag utilisation:flag "
    "counters:flag",
    "Progress": "interval_s",
    "Stragglers": "every:text factor",
    "WatchGradients": "every:count log_norms:flag",
}

_WORD = re.compile(r"(?P<name>\w+)(:(?P<type>\w+))?(?P<required>!?)")


def _arguments(words: str) -> dict[str, Argument]:
    found = (match.groupdict() for match in map(_WORD.fullmatch, words.split()) if match)
    made = (Argument(each["name"], each["type"] or "number", each["required"] == "!") for each in found)
    return {each.name: each for each in made}


def _listed(module: str, table: Mapping[str, str]) -> dict[str, Entry]:
    return {name: Entry(f"{module}:{name}", _arguments(words)) for name, words in table.items()}


KINDS: dict[str, Kind] = {
    "optimizer": Kind(
        "an optimizer",
        "torch.optim:Optimizer",
        ["torch.optim", "trainkit.optim", "transformers.optimization", "deepspeed.ops"],
        {
            **_listed("torch.optim", _OPTIMIZERS),
            "Adafactor": Entry("transformers.optimization:Adafactor", _arguments(_OPTIMIZERS["Adafactor"])),
        },
    ),
    "schedule": Kind(
        "a schedule",
        "torch.optim.lr_scheduler:LRScheduler",
        ["torch.optim", "trainkit.optim"],
        dict(
            sorted(
                {
                    **_listed("torch.optim.lr_scheduler", _TORCH_SCHEDULES),
                    **_listed("trainkit.optim.schedules", _OWN_SCHEDULES),
                }.items()
            )
        ),
    ),
    "tracker": Kind(
        "a tracker", "trainkit.trackers.base:Tracker", ["trainkit.trackers"], _listed("trainkit.trackers", _TRACKERS)
    ),
    "callback": Kind(
        "a callback",
        "trainkit.callbacks.base:Callback",
        ["trainkit.callbacks"],
        _listed("trainkit.callbacks", _CALLBACKS),
    ),
    "module": Kind("a module", "torch.nn:Module", ["torch.nn", "trainkit"]),
    "metric": Kind("a metric", "torchmetrics:Metric", ["torchmetrics", "trainkit.metrics"]),
}
"""Every kind of component by its name."""


def names(kind: str) -> list[str]:
    """The short names of a kind, listed and registered."""
    return list(KINDS[kind].entries)


def register(kind: str, component: type, name: str | None = None) -> None:
    """Lets configurations name a class of the program's own.

    Args:
        kind: a key of `KINDS`.
        component: the class.
        name: how files call it; the class's own name unless given.

    Raises:
        ValueError: the name is taken by another class.
    """
    name = name or component.__name__
    entries = KINDS[kind].entries
    if name in entries and entries[name].target is not component:
        raise ValueError(f"{name!r} is already {KINDS[kind].noun}: give another name")
    entries[name] = Entry(component)


def trust(kind: str, package: str) -> None:
    """Lets configurations name any class of a kind that is defined in `package` by its dotted path."""
    if package not in KINDS[kind].homes:
        KINDS[kind].homes.append(package)


def arguments(kind: str, name: str) -> Mapping[str, Argument] | None:
    """What a class takes, or None when that is not known without importing it.

    Raises:
        UnknownName: the name is neither listed nor a path into a trusted package.
    """
    entry = KINDS[kind].entries.get(name)
    if entry is None:
        _refuse_unknown(KINDS[kind], name)
        return None
    return entry.arguments


def resolve(kind: str, name: str) -> type[Any]:
    """The class behind a name.

    Raises:
        UnknownName: the name stands for nothing, or for something that is not allowed.
        MissingExtra: the class lives in an optional package that is not installed.
    """
    sort = KINDS[kind]
    entry = sort.entries.get(name)
    if entry is None:
        return _resolve_path(sort, name)
    if isinstance(entry.target, type):
        return entry.target
    module, _, attribute = entry.target.partition(":")
    return _class(getattr(_import(module, name), attribute), sort, name)


def build(kind: str, name: str, /, *parts: Any, **given: Any) -> Any:
    """Makes a component: its class, called with `parts` (what it stands on) and the given arguments.

    Raises:
        UnknownName: as for `resolve`.
        WrongArguments: the class does not take these arguments; names the nearest it takes.
    """
    component = resolve(kind, name)
    known = arguments(kind, name)
    if known is None:
        _check_signature(component, name, parts, given)
        return component(*parts, **given)
    return component(*parts, **checked(name, known, given))


def checked(name: str, known: Mapping[str, Argument], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given arguments, each as its type wants it: numbers written as text are numbers, a list of two is a pair.

    Whether a required one is missing is left to the class: some are filled in later.

    Raises:
        WrongArguments: with every problem at once.
    """
    problems: list[tuple[str, str, str, str]] = []
    values: dict[str, Any] = {}
    for argument, value in given.items():
        if argument not in known:
            problems.append((argument, f"no argument of {name}", ", ".join(known), nearest(argument, known)))
            continue
        try:
            values[argument] = _converted(value, known[argument].type)
        except (TypeError, ValueError):
            problems.append((argument, f"is {value!r}", _TYPES[known[argument].type], ""))
    if problems:
        raise WrongArguments(name, problems)
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """The known word that was probably meant, or nothing. Case, `-` and `_` do not count."""
    plain = {re.sub(r"[-_ ]", "", each).lower(): each for each in known}
    found = difflib.get_close_matches(re.sub(r"[-_ ]", "", word).lower(), plain, n=1, cutoff=0.6)
    return plain[found[0]] if found else ""


_TYPES: dict[str, str] = {
    "number": "a number",
    "count": "a whole number",
    "flag": "true or false",
    "pair": "a pair of numbers",
    "text": "a text",
    "any": "anything",
}


def _converted(value: Any, type_: str) -> Any:
    if value is None or type_ == "any" or callable(value):
        return value
    if type_ == "flag":
        return _exactly(value, bool)
    if type_ == "text":
        return _exactly(value, str)
    if type_ == "pair":
        first, second = value
        return _number(first), _number(second)
    if isinstance(value, (list, tuple)) and type_ == "number":
        return [_number(each) for each in value]  # one for each parameter group
    number = _number(value)
    if type_ == "count" and number != int(number):
        raise ValueError
    return int(number) if type_ == "count" else number


def _exactly(value: Any, type_: type) -> Any:
    if not isinstance(value, type_):
        raise TypeError
    return value


def _number(value: Any) -> Any:
    if isinstance(value, bool):
        raise TypeError
    if isinstance(value, str):
        return float(value)
    float(value)  # also what looks like a number, such as a tensor of one element, and only that
    return value


def _refuse_unknown(kind: Kind, name: str) -> None:
    if not _within(name.rpartition(".")[0], kind.homes):
        paths = f"a path into {', '.join(kind.homes)}"
        allowed = f"{', '.join(kind.entries)}, or {paths}" if kind.entries else paths
        raise UnknownName(f"{name!r} is not {kind.noun}", allowed, nearest(name, kind.entries))


def _within(module: str, homes: Iterable[str]) -> bool:
    return any(module == home or module.startswith(f"{home}.") for home in homes)


def _resolve_path(kind: Kind, path: str) -> type[Any]:
    _refuse_unknown(kind, path)
    module, _, attribute = path.rpartition(".")
    found: Any = _import(module, path)
    if not hasattr(found, attribute):
        near = nearest(attribute, [each for each in dir(found) if not each.startswith("_")])
        raise UnknownName(f"{module} has no {attribute!r}", suggestion=f"{module}.{near}" if near else "")
    return _class(getattr(found, attribute), kind, path)


def _class(found: Any, kind: Kind, name: str) -> type[Any]:
    base_module, _, base = kind.base.partition(":")
    expected = getattr(importlib.import_module(base_module), base)
    if not isinstance(found, type) or not issubclass(found, expected):
        raise UnknownName(f"{name!r} is not {kind.noun}: it has to be a class that derives from {base}")
    if not _within(found.__module__, kind.homes):
        raise UnknownName(
            f"{name!r} is defined in {found.__module__}, which is not trusted; trusted are {', '.join(kind.homes)}; "
            f"a program adds its own with trainkit.catalogue.trust or register"
        )
    return found


def _import(module: str, name: str) -> Any:
    if module.partition(".")[0] in ("transformers", "deepspeed"):
        return require(module, name)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UnknownName(f"{name!r}: there is no module {error.name}") from None


def _check_signature(component: type, name: str, parts: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    taken = inspect.signature(component).parameters
    if any(each.kind is inspect.Parameter.VAR_KEYWORD for each in taken.values()):
        return
    known = list(taken)[len(parts) :]
    problems = [
        (each, f"no argument of {name}", ", ".join(known), nearest(each, known)) for each in given if each not in known
    ]
    if problems:
        raise WrongArguments(name, problems)
