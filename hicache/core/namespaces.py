"""Namespaces that hold at least one page: their tree, their shape and their bytes."""

import numpy as np
import numpy.typing as npt

from hicache.base.errors import LawBroken
from hicache.base.ids import NamespaceId
from hicache.core.sessions import Shape
from hicache.index.node import RowOwners
from hicache.index.radix import RadixTree

_MAX_GROUPS = 16


class Namespace:
    """One root of key chains. Found at start it knows only names of groups; `bind` gives it shape and tree."""

    def __init__(self, index: int, id: NamespaceId, tenant: str) -> None:
        self.index = index
        self.id = id
        self.tenant = tenant
        self.group_names: list[str] = []
        self._shape: Shape | None = None
        self._tree: RadixTree | None = None

    @property
    def bound(self) -> bool:
        return self._shape is not None

    @property
    def shape(self) -> Shape:
        if self._shape is None:
            raise LawBroken("law 7: a namespace is used before a session gave it a shape")
        return self._shape

    @property
    def tree(self) -> RadixTree:
        if self._tree is None:
            raise LawBroken("law 7: a namespace is used before a session gave it a shape")
        return self._tree

    @property
    def tree_or_none(self) -> RadixTree | None:
        return self._tree

    def group_bit(self, name: str) -> int | None:
        """Index of a group met at start; None when there are too many of them."""
        if name in self.group_names:
            return self.group_names.index(name)
        if self.bound or len(self.group_names) >= _MAX_GROUPS:
            return None
        self.group_names.append(name)
        return len(self.group_names) - 1

    def bind(self, shape: Shape, owners: RowOwners) -> list[int]:
        """Take the shape of a session. Returns for each group met at start its index in the model, or -1."""
        names = [group.name for group in shape.groups]
        moved = [names.index(name) if name in names else -1 for name in self.group_names]
        self.group_names = names
        self._shape = shape
        self._tree = RadixTree(shape.page_tokens, owners)
        return moved


class Namespaces:
    """Table of namespaces; `rows`, `l2_pages`, `l3_bytes` and `announced` are columns indexed like the table."""

    def __init__(self) -> None:
        self.by_id: dict[NamespaceId, Namespace] = {}
        self.table: list[Namespace | None] = []
        self.owners = RowOwners()  # shared by all trees: their rows come from one table
        self.rows: npt.NDArray[np.int64] = np.zeros(8, np.int64)
        self.l2_pages: npt.NDArray[np.int64] = np.zeros(8, np.int64)  # FILLING pages included
        self.l3_bytes: npt.NDArray[np.int64] = np.zeros(8, np.int64)  # allocated; pages that are leaving not
        self.announced: npt.NDArray[np.bool_] = np.zeros(8, np.bool_)  # are routers told of its pages?
        self.tokens_held = 0  # token ids in all trees together
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self.by_id)

    def __getitem__(self, index: int) -> Namespace:
        namespace = self.table[index]
        if namespace is None:
            raise LawBroken(f"law 8: namespace {index} is gone and has rows")
        return namespace

    def get(self, id: NamespaceId) -> Namespace | None:
        return self.by_id.get(id)

    def add(self, id: NamespaceId, tenant: str) -> Namespace:
        index = self._free.pop() if self._free else len(self.table)
        namespace = Namespace(index, id, tenant)
        if index == len(self.table):
            self.table.append(namespace)
        else:
            self.table[index] = namespace
        if index >= self.rows.size:
            for name in ("rows", "l2_pages", "l3_bytes", "announced"):
                column = getattr(self, name)
                setattr(self, name, np.concatenate((column, np.zeros_like(column))))
        self.by_id[id] = namespace
        return namespace

    def remove_empty(self, index: int) -> None:
        """Forget a namespace whose last row has gone."""
        if self.rows[index] or self.l2_pages[index] or self.l3_bytes[index]:
            raise LawBroken(f"law 8: namespace {index} is forgotten with rows or bytes in it")
        namespace = self[index]
        if namespace.tree_or_none is not None:
            self.tokens_held -= namespace.tree.tokens_held
        del self.by_id[namespace.id]
        self.table[index] = None
        self.announced[index] = False
        self._free.append(index)
