"""Payloads: what goes in comes out, and anything else is refused by one error."""

from __future__ import annotations

import dataclasses
import zlib

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cusearch_async.errors import CorruptPayload
from cusearch_async.transport import codec
from cusearch_async.types import PAYLOAD_SCHEMA, Trajectory
from tests.strategies import make_trajectory, trajectories
from tests.transport.fuzz import fuzz


def assert_same(left: Trajectory, right: Trajectory) -> None:
    for field in dataclasses.fields(Trajectory):
        a, b = getattr(left, field.name), getattr(right, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


@given(trajectories())
def test_a_decoded_trajectory_is_the_encoded_one(trajectory):
    assert_same(codec.decode(codec.encode(trajectory), 1000), trajectory)


@given(trajectories(), st.data())
def test_a_flipped_bit_is_refused(trajectory, data):
    payload = bytearray(codec.encode(trajectory))
    payload[data.draw(st.integers(0, len(payload) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptPayload):
        codec.decode(bytes(payload), 1000)


@given(trajectories(), st.data())
def test_a_cut_payload_is_refused(trajectory, data):
    payload = codec.encode(trajectory)
    with pytest.raises(CorruptPayload):
        codec.decode(payload[: data.draw(st.integers(0, len(payload) - 1))], 1000)


@given(st.binary(max_size=300))
def test_random_bytes_are_refused(payload):
    with pytest.raises(CorruptPayload):
        codec.decode(payload, 1000)


@given(st.recursive(st.none() | st.integers(-(2**60), 2**60) | st.text() | st.binary(), st.lists, max_leaves=30))
def test_foreign_bodies_with_a_right_checksum_are_refused(body):
    encoded = msgspec.msgpack.encode(body)
    payload = b"CUS" + bytes([PAYLOAD_SCHEMA]) + zlib.crc32(encoded).to_bytes(4, "little") + encoded
    with pytest.raises(CorruptPayload):
        codec.decode(payload, 1000)


def test_another_schema_is_refused_by_its_number():
    payload = bytearray(codec.encode(make_trajectory()))
    payload[3] = 9
    with pytest.raises(CorruptPayload, match="schema 9"):
        codec.decode(bytes(payload), 1000)


def test_a_payload_with_a_nan_logprob_is_refused():
    good = codec.encode(make_trajectory())
    body = msgspec.msgpack.decode(good[8:])
    body[9] = np.array([np.nan, 0, 0, 0], dtype="<f4").tobytes()
    encoded = msgspec.msgpack.encode(body)
    with pytest.raises(CorruptPayload, match="finite"):
        codec.decode(good[:4] + zlib.crc32(encoded).to_bytes(4, "little") + encoded, 1000)


def test_of_ten_thousand_mutated_payloads_only_the_typed_error_comes_out():
    outcomes = fuzz(10_000, seed=1)
    assert outcomes["refused"] > 8_000
    assert sum(outcomes.values()) == 10_000


def test_a_payload_that_is_too_long_is_refused_before_it_is_read():
    payload = codec.encode(make_trajectory())
    with pytest.raises(CorruptPayload, match=r"payload has \d+ bytes"):
        codec.decode(payload + b"x" * 2**21, 1000)
