"""The script that counts the functions which a call enters."""

from benchmarks.shape.hops import entered


def test_a_function_counts_once_and_comprehensions_count_with_it() -> None:
    from flatroll.layout import as_tuple

    found = entered(lambda: [as_tuple(key) for key in ("a", "b", ("c", "d"))])
    assert [(function.file, function.name) for function in found] == [("layout/keys.py", "as_tuple")]
