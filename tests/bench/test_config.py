from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from paceline.bench.config import BenchConfig
from paceline.errors import ConfigError


def test_every_field_is_a_flag_with_help() -> None:
    for field in dataclasses.fields(BenchConfig):
        assert field.metadata["help"], field.name
        assert isinstance(field.metadata["choices"], tuple), field.name


def test_the_address_may_end_in_v1_or_not() -> None:
    for url in ("http://h:1", "http://h:1/", "http://h:1/v1", "http://h:1/v1/"):
        assert BenchConfig(server_url=url).api_base == "http://h:1/v1"
    assert BenchConfig(server_url="https://h/proxy").api_base == "https://h/proxy/v1"


def test_extra_body_is_an_object() -> None:
    assert BenchConfig(extra_body='{"a": [1]}').extra_fields() == {"a": [1]}
    assert BenchConfig().extra_fields() == {}


@pytest.mark.parametrize(
    ("values", "flag"),
    [
        ({"server_url": "127.0.0.1:30000"}, "--server-url"),
        ({"server_url": "http://"}, "--server-url"),
        ({"server_url": "http://h:99999"}, "--server-url"),
        ({"server_url": "ftp://h"}, "--server-url"),
        ({"server_url": "http://h/?a=b"}, "--server-url"),
        ({"api": "embeddings"}, "--api"),
        ({"api_key": "a\nb"}, "--api-key"),
        ({"api_key": ""}, "--api-key"),
        ({"concurrency": ()}, "--concurrency"),
        ({"concurrency": (4, 0)}, "--concurrency"),
        ({"concurrency": (-1,)}, "--concurrency"),
        ({"requests_per_level": 0}, "--requests-per-level"),
        ({"warmup": -1}, "--warmup"),
        ({"max_tokens": 0}, "--max-tokens"),
        ({"temperature": -0.1}, "--temperature"),
        ({"temperature": float("nan")}, "--temperature"),
        ({"timeout": 0.0}, "--timeout"),
        ({"timeout": float("inf")}, "--timeout"),
        ({"arrivals": "uniform"}, "--arrivals"),
        ({"arrivals": "poisson"}, "--rate"),
        ({"arrivals": "poisson", "rate": 0.0}, "--rate"),
        ({"rate": 2.0}, "--rate"),
        ({"extra_body": "{"}, "--extra-body"),
        ({"extra_body": "[1]"}, "--extra-body"),
        ({"extra_body": '{"a": "\\ud800"}'}, "--extra-body"),
    ],
)
def test_a_bad_value_is_one_line_that_names_its_flag(values: dict[str, Any], flag: str) -> None:
    with pytest.raises(ConfigError, match=flag) as caught:
        BenchConfig(**values)
    assert "\n" not in str(caught.value)
