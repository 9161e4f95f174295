"""Numbers of request slots: rows of the fixed-size device tables, with their generations.

A slot's generation grows each time the slot is handed out, so that a result that arrives late for a
request that has left is told from one for its successor. Knows nothing of what a slot holds.
"""

from __future__ import annotations


class SlotNumbers:
    """Hands out the numbers 0 .. count - 1."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._generation = [0] * count

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self) -> tuple[int, int]:
        """A free slot and its new generation. Callers check `free` first."""
        slot = self._free.pop()
        self._generation[slot] += 1
        return slot, self._generation[slot]

    def give_back(self, slot: int) -> None:
        assert slot not in self._free, f"slot {slot} given back twice"
        self._free.append(slot)
