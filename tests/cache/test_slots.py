import pytest

from paceline.cache.slots import SlotNumbers


def test_each_tenant_of_a_slot_has_its_own_generation() -> None:
    slots = SlotNumbers(1)
    slot, first = slots.take()
    slots.give_back(slot)
    again, second = slots.take()
    assert again == slot and second != first and slots.free == 0


def test_a_slot_is_given_back_once() -> None:
    slots = SlotNumbers(2)
    slot, _ = slots.take()
    slots.give_back(slot)
    with pytest.raises(AssertionError):
        slots.give_back(slot)
