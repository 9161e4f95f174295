from hypothesis import given
from hypothesis import strategies as st

from paceline.cache.prefix import PrefixCache, owned

TEXTS = st.lists(st.integers(0, 1), max_size=12)


def _pages(start: int, tokens: list[int]) -> list[int]:
    return list(range(start, start + len(tokens) // 2))


def test_match_takes_whole_pages_only() -> None:
    cache = PrefixCache(page_size=2)
    cache.insert([1, 2, 3, 4, 5], [10, 11, 12])
    assert [n.page for n in cache.match([1, 2, 3, 4, 9]).path()] == [10, 11]
    assert [n.page for n in cache.match([1, 2, 3]).path()] == [10]
    assert cache.match([2, 2]).path() == []


def test_pages_of_known_steps_stay_the_callers() -> None:
    cache = PrefixCache(page_size=2)
    cache.insert([1, 2, 3, 4], [10, 11])
    node = cache.insert([1, 2, 3, 4, 5, 6], [20, 21, 22])
    assert [n.page for n in node.path()] == [10, 11, 22]
    assert owned([20, 21, 22, 23], node) == [20, 21, 23]


def test_eviction_takes_the_least_recently_used_leaf_first() -> None:
    cache = PrefixCache(page_size=1)
    first = cache.insert([1], [0])
    second = cache.insert([2, 3], [1, 2])
    for node in (second, first):
        cache.lock(node)
        cache.unlock(node)
    assert cache.evict(1) == [2]  # a leaf of the older path, not its parent
    assert cache.evict(5) == [1, 0]
    assert cache.evictable == cache.cached == 0


@given(st.lists(st.tuples(TEXTS, st.booleans()), max_size=12), st.integers(0, 20))
def test_locked_paths_survive_eviction(texts: list[tuple[list[int], bool]], count: int) -> None:
    cache = PrefixCache(page_size=2)
    held = []
    for i, (text, keep) in enumerate(texts):
        node = cache.insert(text, _pages(100 * i, text))
        cache.lock(node)
        if keep:
            held.append((text, node, [n.page for n in node.path()]))
        else:
            cache.unlock(node)
    before = cache.evictable
    assert len(cache.evict(count)) == min(count, before)
    for text, node, pages in held:
        assert cache.match(text) is node
        assert [n.page for n in node.path()] == pages
    for _, node, _ in held:
        cache.unlock(node)
    left = len(list(cache.nodes()))
    assert cache.evictable == cache.cached == left
    assert len(cache.evict(10_000)) == left
    assert cache.cached == 0


def test_the_list_of_leaves_does_not_grow_with_use() -> None:
    cache = PrefixCache(page_size=1)
    node = cache.insert([1, 2], [0, 1])
    for _ in range(1000):
        cache.lock(node)
        cache.unlock(node)
    assert len(cache._leaves) < 100
