"""Page keys: a keyed hash chain over pages of tokens.

    key[-1] = namespace id
    key[i]  = BLAKE2b-256(secret; key[i-1] ‖ tokens of page i as little-endian int32)

A key therefore names its page, everything before it and the namespace. Both inputs have a fixed length for a
given page size, so that no framing is needed, and the page size itself is part of the namespace.
"""

import hashlib
from collections.abc import Iterator

from hicache.base.ids import DIGEST_BYTES, TOKEN_BYTES, PageKey
from hicache.keys.namespace import check_secret

_PERSON = b"hicache-page-1"


class KeyChain:
    """Computes page keys for one cluster secret and one page size P (`page_tokens`)."""

    def __init__(self, secret: bytes, page_tokens: int) -> None:
        check_secret(secret)
        if page_tokens <= 0:
            raise ValueError(f"page_tokens must be positive, got {page_tokens}")
        self.page_tokens = page_tokens
        # Copying a keyed hasher is cheaper than parsing key and parameters for each page.
        self._keyed = hashlib.blake2b(key=secret, digest_size=DIGEST_BYTES, person=_PERSON)

    def keys(self, previous: bytes, tokens: bytes, first_page: int = 0) -> list[PageKey]:
        """Keys of all full pages of `tokens` from page `first_page` on.

        `tokens` are little-endian int32 from position 0; `previous` is the key of page `first_page - 1`, or the
        namespace id. Tokens beyond the last full page are ignored. About half of the time goes to the hash.
        """
        size = self.page_tokens * TOKEN_BYTES
        copy = self._keyed.copy
        keys: list[PageKey] = []
        append = keys.append
        self._check_previous(previous)
        for start in range(first_page * size, len(tokens) - size + 1, size):
            hasher = copy()
            hasher.update(previous + tokens[start : start + size])
            previous = hasher.digest()
            append(previous)  # type: ignore[arg-type]  # NewType's call would cost as much as the slice
        return keys

    def walk(self, previous: bytes, tokens: bytes, first_page: int = 0) -> Iterator[PageKey]:
        """As `keys`, one at a time: for a caller that stops at the first key it does not know."""
        self._check_previous(previous)
        size = self.page_tokens * TOKEN_BYTES
        for start in range(first_page * size, len(tokens) - size + 1, size):
            hasher = self._keyed.copy()
            hasher.update(previous + tokens[start : start + size])
            previous = hasher.digest()
            yield PageKey(previous)

    @staticmethod
    def _check_previous(previous: bytes) -> None:
        """A short key would shift the boundary between key and tokens and let two chains meet."""
        if len(previous) != DIGEST_BYTES:
            raise ValueError(f"previous key must have {DIGEST_BYTES} bytes, got {len(previous)}")
