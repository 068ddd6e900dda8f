"""The fence area: one 64-byte slot per transfer, in memory shared by a client and the daemon.

Eight little-endian uint64 words per slot; a word is written whole, so a reader never sees half of one.

    0 MAGIC · 1 GENERATION (client, before the request) · 2 STATE · 3 LAYERS_DONE · 4 TICKET · 5 CODE
    6 REVOKED (client, at any time)

The client picks a free slot, zeroes STATE and LAYERS_DONE, writes MAGIC and a fresh GENERATION and names both
in Load or Store. The daemon writes STATE and LAYERS_DONE only, LAYERS_DONE after the bytes of that layer (of
every group), and a terminal STATE last. The client does not reuse the slot before it saw a terminal STATE or
the session ended. L layers of a load are counted in the order of the model's layers, all groups together.

Revoking: the client writes the transfer's generation into REVOKED. The daemon looks after the last byte of a
store's copy, before it ends the fence: a store that was revoked by then ends FAILED and nothing of it is published.
So a client that revokes and then overwrites the source can put no wrong byte into the cache, however late the copy
runs, and needs no answer. A word with another transfer's generation means nothing, so a slot's old word need not be
cleared. Between pieces of a copy, of a load too, the daemon looks as well and stops early; for a load that is a
courtesy and no proof: a piece under way, or a daemon that was stopped in the middle of one, still writes to L1.
"""

SLOT_WORDS = 8
SLOT_BYTES = SLOT_WORDS * 8
MAGIC = 0x31_45_43_4E_45_46_43_48  # "HCFENCE1"

WORD_MAGIC, WORD_GENERATION, WORD_STATE, WORD_LAYERS_DONE, WORD_TICKET, WORD_CODE, WORD_REVOKED = range(7)

STATE_IDLE = 0
STATE_RUNNING = 1
STATE_DONE = 2
STATE_FAILED = 3
