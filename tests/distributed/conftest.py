"""Worlds of ranks, shared by all tests of a session and started when the first of them asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from ranks import Nursery, Ranks


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that wants four ranks without being marked as long: they take their time on two cores."""
    for item in items:
        if "ranks4" in getattr(item, "fixturenames", ()) and item.get_closest_marker("long") is None:
            raise pytest.UsageError(f"{item.nodeid} uses ranks4 and must be marked with @pytest.mark.long")


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """The process that all ranks are forked from."""
    made = Nursery()
    yield made
    made.close()


@pytest.fixture(scope="session")
def ranks(nursery: Nursery) -> Iterator[Callable[[int], Ranks]]:
    """Return the world of so many ranks."""
    worlds: dict[int, Ranks] = {}

    def of(world: int) -> Ranks:
        return worlds.setdefault(world, Ranks(nursery, world))

    yield of
    for each in worlds.values():
        each.close()


@pytest.fixture(scope="session")
def ranks1(ranks: Callable[[int], Ranks]) -> Ranks:
    """One rank with a process group."""
    return ranks(1)


@pytest.fixture(scope="session")
def ranks2(ranks: Callable[[int], Ranks]) -> Ranks:
    """Two ranks."""
    return ranks(2)


@pytest.fixture(scope="session")
def ranks3(ranks: Callable[[int], Ranks]) -> Ranks:
    """Three ranks."""
    return ranks(3)


@pytest.fixture(scope="session")
def ranks4(ranks: Callable[[int], Ranks]) -> Ranks:
    """Four ranks, for long tests only."""
    return ranks(4)
