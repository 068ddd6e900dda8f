"""What the configuration says to KV events before a start would: endpoints, who may read along, whose pages."""

import pytest
from test_config import ROOT, errors_of, load


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("tcp://0.0.0.0:5557", "other machines"),
        ("tcp://*:5557", "other machines"),
        ("tcp://[::]:5557", "other machines"),
        ("tcp://eth0:5557", "other machines"),
        ("tcp://127.0.0.1", "host:port"),
        ("tcp://127.0.0.1:*", "host:port"),
        ("tcp://127.0.0.1:70000", "host:port"),
        ("udp://127.0.0.1:5557", "neither ipc:// nor tcp://"),
        ("ipc://events.sock", "absolute"),
        ("ipc://@abstract", "absolute"),
        ("ipc:///nowhere/at/all/events.sock", "is not a folder"),
        (f"ipc:///{'x' * 104}", "too long"),
        (f"ipc://{ROOT}/README.md", "is not a socket"),
    ],
)
@pytest.mark.parametrize("key", ["endpoint", "replay_endpoint"])
def test_an_endpoint_of_kv_events_is_refused_before_the_start(key: str, endpoint: str, words: str) -> None:
    (error,) = errors_of(None, ["kv_events.enabled=true", f"kv_events.{key}='{endpoint}'"])
    assert error.key == f"kv_events.{key}"
    assert words in error.message
    assert error.remedy


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://localhost:5557"])
def test_kv_events_on_loopback_are_warned_about(endpoint: str) -> None:
    loaded = load(None, ["kv_events.enabled=true", f"kv_events.endpoint='{endpoint}'"])
    assert [(warning.key, "every user" in warning.message) for warning in loaded.warnings] == [
        ("kv_events.endpoint", True)
    ]
    assert not load(None, [f"kv_events.endpoint='{endpoint}'"]).warnings  # nothing is published


def test_kv_events_beyond_this_machine_take_a_second_key() -> None:
    options = ["kv_events.enabled=true", "kv_events.endpoint='tcp://*:5557'", "kv_events.allow_remote=true"]
    assert "whoever reaches" in load(None, options).warnings[0].message


def test_kv_events_need_two_endpoints_and_a_tenant_that_may_connect() -> None:
    on = "kv_events.enabled=true"
    same = ["kv_events.endpoint='tcp://127.0.0.1:5557'", "kv_events.replay_endpoint='tcp://127.0.0.1:5557'"]
    assert errors_of(None, [on, *same])[0].key == "kv_events.replay_endpoint"
    assert errors_of(None, [on, "kv_events.tenants=[]"])[0].key == "kv_events.tenants"
    assert "must be a list" in errors_of(None, [on, "kv_events.tenants=acme"])[0].message
    assert "must be text" in errors_of(None, [on, "kv_events.tenants=[1]"])[0].message
    (warning,) = load(None, [on, "tenants.acme={}"]).warnings
    assert (warning.key, "default may not connect" in warning.message) == ("kv_events.tenants", True)
    assert not load(None, [on, "tenants.acme={}", "kv_events.tenants=[acme]"]).warnings
