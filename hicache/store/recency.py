"""Order of use that is not persisted yet."""

from collections.abc import Iterable
from itertools import islice


class Recency:
    """Row keys with the ordinal of their last use, oldest first. The writer's."""

    def __init__(self) -> None:
        self._used: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._used)

    def touch(self, key: bytes, ordinal: int) -> None:
        self._used.pop(key, None)  # so that the dict stays in order of use
        self._used[key] = ordinal

    def forget(self, keys: Iterable[bytes]) -> None:
        """These rows go, or come with a later use of their own, or have been persisted."""
        for key in keys:
            self._used.pop(key, None)

    def oldest(self, count: int) -> list[tuple[bytes, int]]:
        return list(islice(self._used.items(), count))
