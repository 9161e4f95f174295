"""Radix tree of prefixes whose K/V is in memory, one node a page. No tensors, no requests.

The path from the root to a node spells a prefix in steps of one page of tokens; the node's page
holds the K/V of its last step. A page belongs to the tree from `insert` until `evict`. Nodes in use
are locked: locking a node locks its whole path, so unlocked nodes always form closed subtrees,
every one of them can go, and `evictable` is exact. Eviction takes unlocked leaves, least recently
used first.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

Key = tuple[int, ...]


class Node:
    """One cached page: the tokens that lead to it from its parent, and its page number."""

    __slots__ = ("children", "key", "locks", "page", "parent", "used")

    def __init__(self, key: Key, page: int, parent: Node | None) -> None:
        self.key = key
        self.page = page
        self.parent = parent
        self.children: dict[Key, Node] = {}
        self.locks = 0
        self.used = 0

    def path(self) -> list[Node]:
        """Nodes from the first page to this one; empty for the root."""
        nodes = []
        node = self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixCache:
    """The tree. `evictable`: pages in unlocked nodes. `cached`: pages in all nodes."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.root = Node((), -1, None)
        self.cached = 0
        self.evictable = 0
        self._clock = itertools.count(1)
        self._leaves: list[tuple[int, int, Node]] = []  # (used, tie-break, node), partly stale
        self._ties = itertools.count()

    def match(self, tokens: Sequence[int]) -> Node:
        """Deepest node whose path is a prefix of `tokens`, in whole pages; the root if none."""
        node = self.root
        for key in self._keys(tokens):
            child = node.children.get(key)
            if child is None:
                break
            node = child
        return node

    def insert(self, tokens: Sequence[int], pages: Sequence[int]) -> Node:
        """Make the tree hold this prefix; returns its deepest node, unlocked as it was.

        tokens: those whose K/V is computed; pages: their page table. Pages for steps that the tree
        lacks become the tree's; for steps it has, the caller's pages stay the caller's (`owned`
        tells which). The caller must hold a lock on the result before the next `evict`.
        """
        node = self.root
        for key, page in zip(self._keys(tokens), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = Node(key, page, node)
                child.used = next(self._clock)
                self.cached += 1
                self.evictable += 1
                self._push(child)
            node = child
        return node

    def lock(self, node: Node) -> None:
        """Keep this node and its path until `unlock`."""
        stamp = next(self._clock)
        for each in node.path():
            self.evictable -= each.locks == 0
            each.locks += 1
            each.used = stamp

    def unlock(self, node: Node) -> None:
        for each in node.path():
            assert each.locks > 0, "unlocked more often than locked"
            each.locks -= 1
            if each.locks == 0:
                self.evictable += 1
                self._push(each)

    def evict(self, count: int) -> list[int]:
        """Forget up to `count` unlocked pages, least recently used first; returns their numbers."""
        pages: list[int] = []
        while len(pages) < count and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if node.locks or node.children or node.used != used or node.parent is None:
                continue
            parent = node.parent
            del parent.children[node.key]
            node.parent = None
            pages.append(node.page)
            if parent.parent is not None and not parent.locks:
                self._push(parent)
        self.cached -= len(pages)
        self.evictable -= len(pages)
        return pages

    def nodes(self) -> Iterator[Node]:
        """All nodes, for checks."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def _push(self, node: Node) -> None:
        if node.children:
            return
        heapq.heappush(self._leaves, (node.used, next(self._ties), node))
        if len(self._leaves) > 2 * self.cached + 64:  # mostly stale entries: start over
            leaves = (each for each in self.nodes() if not each.children and not each.locks)
            self._leaves = [(each.used, next(self._ties), each) for each in leaves]
            heapq.heapify(self._leaves)

    def _keys(self, tokens: Sequence[int]) -> Iterator[Key]:
        size = self.page_size
        for start in range(0, len(tokens) - size + 1, size):
            yield tuple(tokens[start : start + size])


def owned(pages: Sequence[int], node: Node) -> list[int]:
    """Those of a request's pages that are its own: not held by the tree on the path to `node`."""
    path = node.path()
    held = {i for i, each in enumerate(path) if i < len(pages) and each.page == pages[i]}
    return [page for i, page in enumerate(pages) if i not in held]
