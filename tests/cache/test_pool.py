import pytest
from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.pool import OutOfPages, PagePool


@given(
    wanted=st.dictionaries(st.integers(0, 9), st.integers(0, 5), max_size=6),
    share=st.floats(0, 1),
)
def test_commit_keeps_the_first_pages_and_frees_the_rest(
    wanted: dict[int, int], share: float
) -> None:
    pool = PagePool(40, 16)
    reservation = pool.reserve(wanted)
    assert pool.free == 40 - sum(wanted.values())
    keep = {row: int(n * share) for row, n in wanted.items()}
    kept = reservation.commit(keep)
    assert {row: len(pages) for row, pages in kept.items()} == {
        row: keep[row] for row, n in wanted.items() if n
    }
    for row, pages in kept.items():
        assert pages == reservation.pages[row][: keep[row]]
    pool.give_back(page for pages in kept.values() for page in pages)
    assert sorted(pool.free_pages()) == list(range(40))


def test_a_reservation_takes_all_or_nothing() -> None:
    pool = PagePool(3, 16)
    with pytest.raises(OutOfPages):
        pool.reserve({0: 2, 1: 2})
    assert pool.free == 3


def test_release_returns_everything_and_ends_the_reservation() -> None:
    pool = PagePool(4, 16)
    reservation = pool.reserve({0: 3})
    reservation.release()
    assert pool.free == 4
    with pytest.raises(AssertionError):
        reservation.commit({})


def test_pages_for_rounds_up() -> None:
    pool = PagePool(4, 16)
    assert [pool.pages_for(n) for n in (0, 1, 16, 17)] == [0, 1, 1, 2]
