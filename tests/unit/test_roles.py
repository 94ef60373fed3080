"""Role classes of a layout, and in which order a standby warms up for them."""

import pytest

from trainmover.schemas.layout import Layout
from trainmover.schemas.roles import classes, role_class_of


def names(layout: str) -> list[str]:
    parsed = Layout.parse(layout)
    return [role_class_of(rank, parsed) for rank in range(parsed.world_size)]


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp=2", ["all", "all"]),
        ("dp=2,pp=1", ["all", "all"]),
        ("pp=2", ["first", "last"]),
        ("pp=3", ["first", "middle", "last"]),
        ("dp=2,pp=2", ["first", "last", "first", "last"]),
        ("pp=4", ["first", "middle", "middle", "last"]),
    ],
)
def test_by_default_the_ends_of_a_pipeline_differ_from_its_middle(
    layout: str, expected: list[str]
) -> None:
    assert names(layout) == expected


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("dp=4", [("all", 2, 4)]),
        ("pp=2,dp=2", [("first", 1, 2), ("last", 3, 2)]),
        ("pp=3,dp=2", [("first", 1, 2), ("last", 5, 2), ("middle", 3, 2)]),
        ("pp=5,dp=2", [("first", 1, 2), ("last", 9, 2), ("middle", 5, 6)]),
    ],
)
def test_the_most_frequent_class_comes_last_and_of_equals_the_middle(
    layout: str, expected: list[tuple[str, int, int]]
) -> None:
    found = classes(Layout.parse(layout))
    assert [(c.name, c.representative, c.count) for c in found] == expected


def test_a_rare_class_that_the_script_names_comes_first() -> None:
    found = classes(Layout.parse("dp=4"), lambda rank, _: "writer" if rank == 3 else "others")
    assert [(c.name, c.representative) for c in found] == [("writer", 3), ("others", 1)]


@pytest.mark.parametrize("name", ["", "x" * 64, "a\nb", 3])
def test_a_class_without_a_name_that_can_be_told_is_refused(name: object) -> None:
    with pytest.raises(ValueError, match=r"expected role_class\(rank, layout\) to return a name"):
        role_class_of(1, Layout.parse("dp=2"), lambda rank, layout: name)  # type: ignore[return-value,arg-type]
