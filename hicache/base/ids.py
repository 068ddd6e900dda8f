"""Names for the integers and byte strings that travel through hicache.

`Row` is the residency row of one page key: a small dense integer, so that columns (numpy arrays) can be
indexed with whole runs of pages at once and no object exists per page.
"""

from typing import NewType

PageKey = NewType("PageKey", bytes)  # 32 bytes, keyed hash chain over token pages
NamespaceId = NewType("NamespaceId", bytes)  # 32 bytes, root of a key chain
Fingerprint = NewType("Fingerprint", bytes)  # 32 bytes, of a model spec or a layout

Row = NewType("Row", int)  # residency row of a page key
BlockId = NewType("BlockId", int)  # index of one block in a group's view of a pool
SessionId = NewType("SessionId", int)  # one incarnation of one client
RequestId = NewType("RequestId", int)  # chosen by the client, unique within its session
LeaseId = NewType("LeaseId", int)
TicketId = NewType("TicketId", int)

DIGEST_BYTES = 32
TOKEN_BYTES = 4  # token ids are little-endian int32 everywhere outside an engine
