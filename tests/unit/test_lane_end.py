"""What a session leaves behind in its fence area when the lane lets go of it."""

import pytest
from test_lanes import Rig

from hicache.base.ids import SessionId
from hicache.protocol import fence as f


@pytest.mark.parametrize("end", ["detach", "close"])
def test_the_end_of_a_session_ends_every_fence_that_is_open(end: str) -> None:
    """Also of requests that never became a job: whoever armed the slot waits for its last word."""
    rig = Rig(2)
    client = rig.attach(1)
    before = {0: f.STATE_IDLE, 1: f.STATE_RUNNING, 2: f.STATE_DONE, 3: f.STATE_FAILED}
    for slot, state in before.items():
        client.arm(slot, 100 + slot)
        client.words[slot, f.WORD_STATE] = state
        client.words[slot, f.WORD_LAYERS_DONE] = 1
    client.words[5, f.WORD_GENERATION] = 9  # no MAGIC: not a slot yet
    if end == "detach":
        rig.lane.detach(SessionId(1))
    else:
        rig.lane.close()
    assert [client.state(slot) for slot in range(4)] == [f.STATE_FAILED, f.STATE_FAILED, f.STATE_DONE, f.STATE_FAILED]
    assert [int(client.words[slot, f.WORD_GENERATION]) for slot in range(4)] == [100, 101, 102, 103]
    assert [client.layers(slot) for slot in range(4)] == [1] * 4
    assert client.state(5) == client.state(6) == f.STATE_IDLE
    rig.lane.close()
    client.close()
