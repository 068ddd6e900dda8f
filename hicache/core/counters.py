"""What was counted since the start. All only ever grow."""

from dataclasses import dataclass, fields


@dataclass(slots=True)
class Counters:
    """Law 9: tokens_looked_up = tokens_l2 + tokens_l3 + tokens_missed, at every moment.

    Tokens are counted when a lease is asked for; a probe counts as a probe only. `tokens_loaded` arrived in L1,
    `tokens_failed` were promised and did not.
    """

    lookups: int = 0
    probes: int = 0
    tokens_looked_up: int = 0
    tokens_l2: int = 0
    tokens_l3: int = 0
    tokens_missed: int = 0
    tokens_loaded: int = 0
    tokens_failed: int = 0
    loads: int = 0
    stores: int = 0
    stored_pages: int = 0
    duplicate_pages: int = 0
    refused_pages: int = 0
    prefetched_pages: int = 0
    promoted_pages: int = 0
    evicted_l2: int = 0
    evicted_l3: int = 0
    written_pages: int = 0
    unwritten_pages: int = 0
    failed_copies: int = 0
    failed_reads: int = 0
    failed_writes: int = 0
    corrupt_records: int = 0
    recovered_records: int = 0
    late_answers: int = 0
    expired_leases: int = 0
    rejected_requests: int = 0

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in _NAMES}


_NAMES = tuple(each.name for each in fields(Counters))
