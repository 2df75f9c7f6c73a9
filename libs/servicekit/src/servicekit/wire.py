"""Counts the fields of an encoded message before it is parsed.

An empty submessage takes two bytes on the wire and about 120 once it is parsed, so the size of a request says little
about its memory. The scanner reads tags and lengths alone, allocates nothing for what it passes, and stops at a limit.
"""

from __future__ import annotations

from typing import TypeAlias

from google.protobuf.descriptor import Descriptor

Shape: TypeAlias = dict[int, "Shape"]
"""Tags of the fields that hold messages, each with the shape of that message."""

_VARINT, _FIXED64, _LENGTH, _FIXED32 = 0, 1, 2, 5
_MAX_VARINT_BITS = 63


class Malformed(ValueError):
    """The bytes are not an encoded message."""


def shape_of(descriptor: Descriptor) -> Shape:
    """Where messages of this type hold other messages."""
    return _shape(descriptor, {})


def _shape(descriptor: Descriptor, known: dict[str, Shape]) -> Shape:
    shape = known.get(descriptor.full_name)
    if shape is None:
        shape = known[descriptor.full_name] = {}  # before its fields: a message may hold messages of its own type
        for field in descriptor.fields:
            if field.message_type is not None:
                shape[field.number << 3 | _LENGTH] = _shape(field.message_type, known)
    return shape


def has_more_fields(raw: bytes, shape: Shape, limit: int) -> bool:
    """Whether a message holds more than `limit` fields, counting those of the messages within it.

    Raises:
        Malformed: these bytes are no message of this shape.
    """
    if len(raw) // 2 <= limit:
        return False  # a field takes at least two bytes
    try:
        return _exceeds(raw, shape, limit)
    except IndexError:
        raise Malformed("a field is cut off") from None


def _exceeds(raw: bytes, shape: Shape, limit: int) -> bool:
    position, end, count = 0, len(raw), 0
    outer: list[tuple[int, Shape]] = []
    while True:
        while position >= end:
            if position > end:
                raise Malformed("a field goes beyond its message")
            if not outer:
                return False
            end, shape = outer.pop()
        count += 1
        if count > limit:
            return True
        tag = raw[position]
        position += 1
        if tag >= 0x80:
            tag, position = _varint(raw, position - 1)
        wire_type = tag & 7
        if wire_type == _LENGTH:
            length = raw[position]
            position += 1
            if length >= 0x80:
                length, position = _varint(raw, position - 1)
            inner = shape.get(tag)
            if inner is None:
                position += length
            else:
                outer.append((end, shape))
                if position + length > end:
                    raise Malformed("a message goes beyond the one around it")
                end, shape = position + length, inner
        elif wire_type == _VARINT:
            while raw[position] >= 0x80:
                position += 1
            position += 1
        elif wire_type == _FIXED64:
            position += 8
        elif wire_type == _FIXED32:
            position += 4
        else:
            raise Malformed(f"a field of wire type {wire_type}")


def _varint(raw: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while shift <= _MAX_VARINT_BITS:
        byte = raw[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise Malformed("a number of more than ten bytes")
