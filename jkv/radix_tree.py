"""The radix tree under the prefix cache: runs of whole pages, keyed by their tokens.

Two children of a node differ within their first page, which is the key that they are found by; the rest of a node is
compared as an array. Nodes are split where sequences part or a match ends, always between two pages.
"""

from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Tokens = npt.NDArray[np.signedinteger]
Slots = npt.NDArray[np.int32]


class Node:
    """A run of cached pages behind its parent's. For a user: what `match_prefix` found, to lock and unlock.

    A node that is split keeps its end: who holds it still holds the same prefix.

    Attributes:
      parent: None for the root, and for a node that is no longer in the tree.
      children: by `key`.
      key: the tokens of the first page as bytes; below the root together with `extra_key`.
      extra_key: the tree that the node is in.
      tokens: `[n * page]`, in the integer dtype that they came in: nothing is widened to be compared.
      slots: int32 `[n * page]`, the slot of each token.
      hashes: uint64 `[n]` where events are on, else None.
      lock_ref: locks on this node and below it.
      held: locks on this very node.
      last_use: logical time of the last match or insertion that came along.
      serial: number of the node in order of creation.
      queued: whether it has an entry in the queue for eviction.
    """

    __slots__ = (
        *("parent", "children", "key", "extra_key", "tokens", "slots", "hashes"),
        *("lock_ref", "held", "last_use", "serial", "queued"),
    )

    def __init__(self, parent: "Node | None", key: Any, extra_key: Hashable, serial: int):
        self.parent: Any = parent  # Node | None, but None only where nobody climbs
        self.key, self.extra_key, self.serial = key, extra_key, serial
        self.children: dict[Any, Node] = {}
        self.tokens: Tokens = np.empty(0, np.int32)
        self.slots: Slots = np.empty(0, np.int32)
        self.hashes: npt.NDArray[np.uint64] | None = None
        self.lock_ref = self.held = self.last_use = 0
        self.queued = False

    def __repr__(self) -> str:
        return f"Node({self.tokens.size} tokens, lock_ref {self.lock_ref})"


class Found(NamedTuple):
    """The nodes that a sequence leads along, and how many of its tokens they hold; the last may reach beyond that."""

    nodes: list[Node]
    length: int


class RadixTree:
    """Nodes from a root down, and who is whose child; knows nothing of locks, sizes and eviction.

    Args:
      page: tokens of a page.
    """

    def __init__(self, page: int):
        self.page = page
        self._serials = 0
        self.root = self._new(None, None, None)

    def _new(self, parent: Node | None, key: Any, extra_key: Hashable) -> Node:
        self._serials += 1
        return Node(parent, key, extra_key, self._serials)

    def _key(self, parent: Node, extra_key: Hashable, tokens: Tokens, at: int) -> Any:
        first = tokens[at : at + self.page].astype(np.int64).tobytes()
        return (extra_key, first) if parent is self.root else first

    def find(self, tokens: Tokens, extra_key: Hashable) -> Found:
        """The longest prefix of `tokens` in the tree, in whole pages. Changes nothing."""
        page, node, at = self.page, self.root, 0
        nodes: list[Node] = []
        end = tokens.size // page * page
        while at < end:
            child = node.children.get(self._key(node, extra_key, tokens, at))
            if child is None:
                break
            same = min(child.tokens.size, end - at)
            differ = child.tokens[page:same] != tokens[at + page : at + same]
            if differ.any():
                same = (page + int(differ.argmax())) // page * page
            nodes.append(child)
            node, at = child, at + same
            if same < child.tokens.size:
                break
        return Found(nodes, at)

    def slots_of(self, found: Found) -> Slots:
        """int32 `[length]`: the slots that hold what was found, the caller's own memory."""
        return np.concatenate([node.slots for node in found.nodes] or [self.root.slots])[: found.length]

    def cut(self, found: Found) -> Node:
        """The node that ends where `found` does (the root where nothing was), split off if need be."""
        if not found.nodes:
            return self.root
        beyond = sum(node.tokens.size for node in found.nodes) - found.length
        if beyond:
            found.nodes[-1] = self._split(found.nodes[-1], found.nodes[-1].tokens.size - beyond)
        return found.nodes[-1]

    def _split(self, node: Node, length: int) -> Node:
        """Moves the first `length` tokens of `node` into a new parent of it, locked as often as `node` is."""
        parent: Node = node.parent
        head = self._new(parent, node.key, node.extra_key)
        head.lock_ref, head.last_use = node.lock_ref, node.last_use
        # Copies: a small part must not keep a long array alive.
        head.tokens, node.tokens = node.tokens[:length].copy(), node.tokens[length:].copy()
        head.slots, node.slots = node.slots[:length].copy(), node.slots[length:].copy()
        if node.hashes is not None:
            pages = length // self.page
            head.hashes, node.hashes = node.hashes[:pages].copy(), node.hashes[pages:].copy()
        parent.children[node.key] = head
        node.parent, node.key = head, self._key(head, node.extra_key, node.tokens, 0)
        head.children[node.key] = node
        return head

    def add(self, parent: Node, extra_key: Hashable, tokens: Tokens, slots: Slots) -> Node:
        """A new leaf below `parent`, none of whose children starts with the same page. The arrays are kept."""
        node = self._new(parent, self._key(parent, extra_key, tokens, 0), extra_key)
        node.tokens, node.slots = tokens, slots
        parent.children[node.key] = node
        return node

    def remove(self, leaf: Node) -> Node:
        """Takes a leaf out of the tree and returns its former parent."""
        parent: Node = leaf.parent
        del parent.children[leaf.key]
        leaf.parent = None
        return parent

    def clear(self) -> Iterator[Node]:
        """Takes every node out of the tree, children before their parents, and yields them."""
        nodes = [self.root]
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes[1:]):
            node.children.clear()
            node.parent = None
            yield node
        self.root.children.clear()

    def path_up(self, node: Node) -> list[Node] | None:
        """`node` and its ancestors without the root; None where they do not lead to it: the node is not in the tree."""
        nodes = []
        while node is not self.root:
            nodes.append(node)
            if node.parent is None:
                return None
            node = node.parent
        return nodes
