"""The whole daemon over real sockets: a session's life, data through L2 and L3, refusals, bounds, descriptions."""

import json
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from hicache.base.errors import ErrorCode
from hicache.protocol.messages import (
    Attached,
    Busy,
    Describe,
    Done,
    Error,
    Goodbye,
    Hello,
    Load,
    Lookup,
    Match,
    Refuse,
    Release,
    Renew,
    Scope,
    Welcome,
)
from hicache.protocol.version import VERSION
from hicache.spec.layout import GroupLayout, L1Layout
from tests.daemon_harness import (
    PAGE_TOKENS,
    POOL_BLOCKS,
    DaemonProcess,
    RawClient,
    int32,
    layout,
    model,
    tokens,
)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    overrides = ["limits.sessions=6", "limits.requests_in_flight=8", "limits.body_size=64KiB"]
    with DaemonProcess(tmp_path_factory.mktemp("daemon"), overrides, l3=True) as process:
        yield process
        assert process.process.poll() is None, process.log()
        assert process.stop() == 0
        assert not process.events("event.failed"), process.log()
        assert not process.events("request.failed"), process.log()


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon) as raw:
        yield raw.open()


def fill(client: RawClient, blocks: range, seed: int) -> np.ndarray:
    """Random content in these blocks; what was put there."""
    rng = np.random.default_rng(seed)
    for at in blocks:
        client.block(at)[:] = rng.integers(0, 256, client.block(at).shape, np.uint8)
    return np.stack([client.block(at).copy() for at in blocks])


# ---- data -------------------------------------------------------------------------------------------


def test_stored_pages_come_back_byte_for_byte_in_other_blocks(client: RawClient) -> None:
    data, source, target = tokens(8 * PAGE_TOKENS, seed=1), range(8), range(20, 28)
    written = fill(client, source, seed=1)
    accepted, done = client.store(data, source)
    assert (accepted.pages, done.pages) == (8, 8)
    match = client.lookup(data)
    assert (match.known_tokens, match.resumable_tokens, match.l2_tokens) == (128, 128, 128)
    client.load(match.lease, target)
    assert np.array_equal(np.stack([client.block(at) for at in target]), written)
    client.release(match.lease)


def test_a_second_client_of_the_same_model_hits_and_does_not_store_again(
    daemon: DaemonProcess, client: RawClient
) -> None:
    data = tokens(4 * PAGE_TOKENS, seed=2)
    written = fill(client, range(4), seed=2)
    client.store(data, range(4))
    with RawClient(daemon).open() as other:
        match = other.lookup(data)
        other.load(match.lease, range(4))
        assert np.array_equal(np.stack([other.block(at) for at in range(4)]), written)
        accepted, done = other.store(data, range(4))
        assert (accepted.pages, done.pages) == (0, 0)


@pytest.mark.parametrize("difference", ["revision", "tenant", "salt"])
def test_another_model_tenant_or_salt_never_sees_these_pages(
    daemon: DaemonProcess, client: RawClient, difference: str
) -> None:
    data = tokens(4 * PAGE_TOKENS, seed=3)
    client.store(data, range(4))
    with RawClient(daemon) as other:
        other.attach()
        spec = model(revision="r2") if difference == "revision" else model()
        tenant = "other" if difference == "tenant" else "default"
        assert isinstance(other.hello(spec, tenant=tenant), Welcome)
        scope = Scope(salt="pepper") if difference == "salt" else Scope()
        match = other.ask(Lookup(64, 64, True, scope), (data,))
        assert isinstance(match, Match)
        assert match.known_tokens == 0


def test_a_prompt_shorter_than_a_page_and_an_empty_one_are_misses(client: RawClient) -> None:
    assert client.lookup(tokens(5, seed=4)).resumable_tokens == 0
    assert client.lookup(b"").resumable_tokens == 0


def test_a_limit_caps_what_is_resumable_to_whole_pages(client: RawClient) -> None:
    data = tokens(4 * PAGE_TOKENS, seed=5)
    client.store(data, range(4))
    match = client.ask(Lookup(64, 63), (data,))
    assert isinstance(match, Match)
    assert match.resumable_tokens == 48


# ---- who may come in --------------------------------------------------------------------------------


def test_welcome_names_the_limits_and_every_reply_the_boot(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        attached = raw.attach()
        welcome = raw.hello()
        assert isinstance(welcome, Welcome)
        assert (welcome.version, welcome.limits.requests_in_flight) == (VERSION, 8)
        assert raw.boot_id == attached.boot != 0  # type: ignore[union-attr]
        raw.describe()
        assert raw.boot_id == attached.boot  # type: ignore[union-attr]


def test_without_a_session_everything_but_hello_and_describe_is_refused(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        for message, buffers in (
            (Lookup(1, 1), (int32([1]),)),
            (Release((1,)), ()),
            (Renew(), ()),
            (Goodbye(), ()),
            (Load(1, 0, (0,), 0, 1), (b"",)),
        ):
            reply = raw.ask(message, buffers)
            assert isinstance(reply, Error)
            assert reply.code == ErrorCode.UNKNOWN_SESSION
        assert raw.describe()["ready"]


def test_hello_without_its_lifeline_is_refused_with_the_remedy(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        refuse = raw.hello()
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.UNKNOWN_SESSION
        assert "lifeline" in refuse.remedy


def test_between_attach_and_hello_nobody_takes_the_memory_over(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw, RawClient(daemon) as thief:
        assert isinstance(raw.attach(), Attached)
        thief.instance, thief.epoch = raw.instance, raw.epoch + 1
        unknown = thief.hello()
        assert isinstance(unknown, Refuse)
        thief.epoch = raw.epoch
        told = Refuse(
            unknown.code, unknown.reason.replace(f"epoch {raw.epoch + 1}", f"epoch {raw.epoch}"), unknown.remedy
        )
        for token in (b"", bytes(16), raw.token[:15], raw.token[:15] + bytes((raw.token[15] ^ 1,))):
            assert thief.hello(token=token) == told, "as if nothing were attached"
        too_long = thief.hello(token=raw.token + b"x")
        assert isinstance(too_long, Error)
        assert too_long.code == ErrorCode.MALFORMED
        assert isinstance(raw.hello(), Welcome)


def test_each_attach_draws_its_own_token(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        tokens_seen = set()
        for _ in range(3):
            attached = raw.attach()
            assert isinstance(attached, Attached)
            tokens_seen.add(attached.token)
        assert len(tokens_seen) == 3
        assert all(len(token) == 16 for token in tokens_seen)
        old = min(tokens_seen - {raw.token})
        assert isinstance(raw.hello(token=old), Refuse)


def test_a_model_or_layout_that_does_not_add_up_is_refused_and_can_be_corrected(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        raw.attach()
        small = raw.hello(lay=layout(POOL_BLOCKS + 1))
        assert isinstance(small, Refuse)
        assert small.code == ErrorCode.BAD_SPEC
        assert "pool_bytes" in small.reason
        mismatch = raw.hello(model(), half_layout())
        assert isinstance(mismatch, Refuse)
        future = raw.ask(Hello((99 << 8,), raw.instance, raw.epoch, model(), layout(), token=raw.token))
        assert isinstance(future, Refuse)
        assert future.code == ErrorCode.VERSION
        assert isinstance(raw.hello(), Welcome)


def half_layout() -> L1Layout:
    good = layout()
    group = good.groups[0]
    bad = GroupLayout(
        group.group, group.layer_offsets, group.blocks, group.block_stride, group.axes, group.run_bytes // 2
    )
    return L1Layout(good.pool_bytes, (bad,))


def test_a_model_whose_block_exceeds_the_parent_is_refused_naming_the_key(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path, ["l2.parent=4KiB"]) as small, RawClient(small) as raw:
        raw.attach()
        refuse = raw.hello()
        assert isinstance(refuse, Refuse)
        assert "l2.parent" in refuse.reason + refuse.remedy
        assert raw.hung_up_on()
        assert small.describe()["sessions"] == 0


def test_a_tenant_needs_its_credential(tmp_path: Path) -> None:
    credential = tmp_path / "credential"
    credential.write_text("sesame\n")
    credential.chmod(0o600)
    config = tmp_path / "hicache.yaml"
    config.write_text(f"tenants:\n  alice:\n    credential_file: {credential}\n  open:\n")
    with DaemonProcess(tmp_path) as guarded, RawClient(guarded) as raw:
        raw.attach()
        for tenant, given in (("alice", ""), ("alice", "wrong"), ("mallory", "sesame"), ("default", "")):
            refuse = raw.hello(tenant=tenant, credential=given)
            assert isinstance(refuse, Refuse)
            assert refuse.code == ErrorCode.DENIED
        assert isinstance(raw.hello(tenant="alice", credential="sesame"), Welcome)
        raw.attach()
        assert isinstance(raw.hello(tenant="open"), Welcome)
        assert "sesame" not in str(guarded.describe("config")) + guarded.log()


def test_a_tenant_cannot_end_the_session_of_another_by_its_instance_id(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path) as shared, RawClient(shared) as victim, RawClient(shared) as other:
        victim.attach()
        assert isinstance(victim.hello(tenant="a"), Welcome)
        other.instance, other.epoch = victim.instance, victim.epoch
        other.attach()
        refuse = other.hello(tenant="b")
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.DENIED
        assert other.hung_up_on()
        victim.store(tokens(2 * PAGE_TOKENS, seed=20), range(2))
        other.attach()
        assert isinstance(other.hello(tenant="a"), Welcome)  # its own next incarnation still supersedes
        assert victim.hung_up_on()


def test_sessions_are_bounded(daemon: DaemonProcess) -> None:
    clients = [RawClient(daemon) for _ in range(7)]
    try:
        for raw in clients[:6]:
            raw.open()
        clients[6].attach()
        refuse = clients[6].hello()
        assert isinstance(refuse, Refuse)
        assert refuse.code == ErrorCode.BUSY
    finally:
        for raw in clients:
            raw.__exit__(None, None, None)


# ---- bounds and lies --------------------------------------------------------------------------------


def test_over_its_credits_a_client_is_told_busy_and_served_again_later(client: RawClient) -> None:
    data = tokens(2000 * PAGE_TOKENS, seed=6)
    requests = [client.send(Lookup(len(data) // 4, 0, False), (data,)) for _ in range(100)]
    replies = [client.receive(request) for request in requests]
    assert {type(reply) for reply in replies} <= {Match, Busy}
    assert client.lookup(data).lease >= 0


def test_a_lease_of_another_session_is_unknown(daemon: DaemonProcess, client: RawClient) -> None:
    data = tokens(2 * PAGE_TOKENS, seed=7)
    client.store(data, range(2))
    match = client.lookup(data)
    with RawClient(daemon).open() as thief:
        slot, generation = thief.new_fence()
        reply = thief.ask(Load(match.lease, 0, (2,), slot, generation), (int32([0, 1]),))
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.UNKNOWN_LEASE
        assert isinstance(thief.ask(Release((match.lease,))), Done)
    client.load(match.lease, range(2))  # the thief's Release did nothing


def test_blocks_out_of_range_and_a_fence_out_of_range_are_errors(client: RawClient) -> None:
    data = tokens(2 * PAGE_TOKENS, seed=8)
    client.store(data, range(2))
    match = client.lookup(data)
    slot, generation = client.new_fence()
    for blocks, fence in (([0, POOL_BLOCKS], slot), ([-1, 0], slot), ([0, 1], client.fence_slots)):
        reply = client.ask(Load(match.lease, 0, (2,), fence, generation), (int32(blocks),))
        if not isinstance(reply, Error):  # the fence is only found bad by the lane, after Accepted
            reply = client.receive()
        assert isinstance(reply, Error), reply
        assert reply.code in {ErrorCode.OUT_OF_RANGE, ErrorCode.TRANSFER_FAILED}
    client.load(match.lease, range(2))


def test_a_second_hello_on_the_connection_replaces_the_session(daemon: DaemonProcess) -> None:
    with RawClient(daemon).open() as raw:
        first = raw.lifeline
        assert first is not None
        raw.lifeline = None
        raw.open()
        assert first.recv(1) == b""
        assert daemon.describe()["sessions"] == 1
        assert raw.lookup(tokens(20)).resumable_tokens == 0


def test_goodbye_is_answered_and_closes_the_lifeline(daemon: DaemonProcess) -> None:
    with RawClient(daemon).open() as raw:
        assert isinstance(raw.ask(Goodbye()), Done)
        assert raw.hung_up_on()
        assert isinstance(raw.ask(Renew()), Error)


# ---- descriptions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["status", "config", "l2", "l3", "sessions"])
def test_every_description_is_plain_data_with_its_schema_version_first(
    daemon: DaemonProcess, client: RawClient, what: str
) -> None:
    data = client.describe(what)
    assert next(iter(data)) == "schema_version"
    assert json.loads(json.dumps(data)) == data


def test_the_status_says_how_the_daemon_is(daemon: DaemonProcess, client: RawClient) -> None:
    status = daemon.describe()
    assert (status["state"], status["ready"], status["reasons"]) == ("ready", True, [])
    assert status["pid"] == daemon.process.pid
    assert status["sessions"] == 1
    assert status["boot_id"] == f"{client.boot_id:016x}"
    assert set(status["loop_lag_ms"]) == {"now", "p99", "max"}
    (session,) = daemon.describe("sessions")["sessions"]
    assert (session["engine"], session["tenant"], session["pid"]) == ("raw", "default", os.getpid())
    assert client.instance.hex() not in str(daemon.describe("sessions"))


def test_an_unknown_part_is_malformed(daemon: DaemonProcess) -> None:
    with RawClient(daemon) as raw:
        reply = raw.ask(Describe("secrets"))  # type: ignore[arg-type]
        assert isinstance(reply, Error)
        assert reply.code == ErrorCode.MALFORMED
