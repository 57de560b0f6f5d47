"""Which leaf of a prefix cache goes next."""

import heapq

from jkv.radix_tree import Node


class EvictionQueue:
    """Leaves without locks, the least recently used first.

    A node has one entry at most, and an entry may be outdated: its node has been used since, or locked, or has got
    children. As last uses only grow, it then comes up too early rather than too late, and is put back or dropped. So
    a use costs nothing here, and `pop` a few steps down a heap.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Node]] = []

    def push(self, node: Node) -> None:
        """Queues `node` where it may go: call it when it has lost its last child or its last lock, or is new."""
        if not (node.queued or node.children or node.lock_ref or node.parent is None):
            node.queued = True
            heapq.heappush(self._heap, (node.last_use, node.serial, node))

    def pop(self) -> Node | None:
        """The next leaf that may go, which is no longer queued; None where none may."""
        while self._heap:
            last_use, _, node = heapq.heappop(self._heap)
            node.queued = False
            if node.last_use > last_use:
                self.push(node)
            elif not node.children and not node.lock_ref:
                return node
        return None

    def clear(self) -> None:
        """Forgets all nodes."""
        self._heap.clear()
