"""Amounts of CPU and memory, and lengths of time, as a document writes them.

CPU and memory follow Kubernetes: `2`, `"500m"` cores; `"512Mi"`, `"2Gi"`, `"2G"` bytes. Durations are texts with a unit
each: `30s`, `1h30m`, `7d`.
"""

from __future__ import annotations

import re
from decimal import Decimal
from fractions import Fraction

CPU_PATTERN = r"^([0-9]+(\.[0-9]+)?|[0-9]+m)$"
MEMORY_PATTERN = r"^[0-9]+(\.[0-9]+)?(Ki|Mi|Gi|Ti|Pi|k|M|G|T|P)?$"
DURATION_PATTERN = r"^([0-9]+(\.[0-9]+)?(ms|s|m|h|d|w))+$"

CPU_ALLOWED = 'cores as a whole number, or a text such as "500m" (thousandths) or "1.5"'
MEMORY_ALLOWED = 'a text with a unit such as "512Mi", "2Gi" or "2G", or a whole number of bytes'
DURATION_ALLOWED = "a text with units ms, s, m, h, d or w, such as 30s, 1h30m or 7d"

_MEMORY_FACTORS = {
    "": 1,
    **{unit: 1000**power for power, unit in enumerate(("k", "M", "G", "T", "P"), 1)},
    **{unit: 1024**power for power, unit in enumerate(("Ki", "Mi", "Gi", "Ti", "Pi"), 1)},
}
_MILLISECONDS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000, "w": 604_800_000}
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h|d|w)")
_LOOSE_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*")
LONGEST = 40  # characters; more is no quantity, and slow to convert

_MEMORY_SPELLINGS = {
    "m": "Mi",
    "mb": "M",
    "mib": "Mi",
    "meg": "M",
    "g": "G",
    "gb": "G",
    "gib": "Gi",
    "gi": "Gi",
    "mi": "Mi",
}
_MEMORY_SPELLINGS |= {
    "k": "k",
    "kb": "k",
    "kib": "Ki",
    "ki": "Ki",
    "t": "T",
    "tb": "T",
    "tib": "Ti",
    "ti": "Ti",
    "b": "",
}
_DURATION_SPELLINGS = {
    **dict.fromkeys(("ms", "msec", "millis", "milliseconds"), "ms"),
    **dict.fromkeys(("s", "sec", "secs", "second", "seconds"), "s"),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), "m"),
    **dict.fromkeys(("h", "hr", "hrs", "hour", "hours"), "h"),
    **dict.fromkeys(("d", "day", "days"), "d"),
    **dict.fromkeys(("w", "week", "weeks"), "w"),
}


class QuantityError(ValueError):
    """A value is no quantity. `allowed` says what is; `suggestion` is what was probably meant, or empty."""

    def __init__(self, message: str, allowed: str, suggestion: str = "") -> None:
        super().__init__(message)
        self.allowed = allowed
        self.suggestion = suggestion


def cpu_cores(value: object) -> float:
    """Cores as a number: 2 and "2" are 2.0, "500m" is 0.5.

    Raises:
        QuantityError: the value is no amount of CPU.
    """
    if _is_whole(value):
        return float(value)  # type: ignore[arg-type]
    if not isinstance(value, str) or not _matches(CPU_PATTERN, value):
        raise QuantityError("not an amount of CPU", CPU_ALLOWED, _suggest_cpu(value))
    return float(Fraction(value[:-1]) / 1000) if value.endswith("m") else float(value)


def memory_bytes(value: object) -> int:
    """Bytes as a whole number: "2Gi" is 2147483648, "2G" is 2000000000. Fractions of a byte are dropped.

    Raises:
        QuantityError: the value is no amount of memory.
    """
    if _is_whole(value):
        return int(value)  # type: ignore[call-overload, no-any-return]
    if not isinstance(value, str) or not _matches(MEMORY_PATTERN, value):
        raise QuantityError("not an amount of memory", MEMORY_ALLOWED, _suggest_memory(value))
    number = value.rstrip("KMGTPki")
    return int(Fraction(number) * _MEMORY_FACTORS[value[len(number) :]])


def seconds(value: object) -> float:
    """A duration in seconds: "1h30m" is 5400.0.

    Raises:
        QuantityError: the value is no duration.
    """
    if not isinstance(value, str) or not _matches(DURATION_PATTERN, value):
        raise QuantityError(_duration_complaint(value), DURATION_ALLOWED, _suggest_duration(value))
    total = sum(Fraction(number) * _MILLISECONDS[unit] for number, unit in _DURATION_PART.findall(value))
    return float(total / 1000)


def _is_whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _matches(pattern: str, value: str) -> bool:
    # fullmatch, because `$` alone would let a line end pass.
    return len(value) <= LONGEST and re.fullmatch(pattern[1:-1], value) is not None


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _suggest_cpu(value: object) -> str:
    if isinstance(value, float) and 0.001 <= value < 1e6:
        return f'"{round(value * 1000)}m"'
    number, unit = (_parts(value) or [("", "")])[0]
    if unit == "m" and "." not in number:
        return f"{number}m"
    return number if unit.rstrip("s") in ("core", "cpu", "vcpu") else ""


def _suggest_memory(value: object) -> str:
    if isinstance(value, float) and 0.001 <= value < 1e6:
        return f'"{Decimal(str(value)):f}Gi"'
    parts = _parts(value)
    unit = _MEMORY_SPELLINGS.get(parts[0][1]) if len(parts) == 1 else None
    return "" if unit is None else f"{parts[0][0]}{unit}"


def _suggest_duration(value: object) -> str:
    if _is_number(value) and 0.001 <= value < 1e9:  # type: ignore[operator]
        return f"{Decimal(str(value)):f}s"
    if isinstance(value, str) and re.fullmatch(r"[0-9]{1,12}", value):
        return f"{value}s"
    parts = _parts(value)
    if any(unit not in _DURATION_SPELLINGS for _, unit in parts):
        return ""
    return "".join(number + _DURATION_SPELLINGS[unit] for number, unit in parts)


def _duration_complaint(value: object) -> str:
    unitless = _is_number(value) or (isinstance(value, str) and re.fullmatch(r"[0-9]+", value))
    return "a duration needs a unit" if unitless else "not a duration"


def _parts(value: object) -> list[tuple[str, str]]:
    """The numbers and lower-case words of a loosely written quantity; nothing when it has anything else."""
    if not isinstance(value, str) or len(value) > LONGEST // 2:
        return []
    text = value.strip().lower()
    return _LOOSE_PART.findall(text) if re.fullmatch(f"({_LOOSE_PART.pattern})+", text) else []
