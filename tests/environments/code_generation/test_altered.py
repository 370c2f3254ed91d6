import pytest

from trl_multiagent.environments.code_generation.altered import alter_values, alteration


VALUES = [0, 1, -1, 7, 2.5, True, False, "", "a", b"", b"a", [], [3], (), (3,), set(), {3}, frozenset({3}), {}, {1: 2}]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_another_value_of_the_same_type(value):
    altered = alter_values(lambda: value)()
    assert type(altered) is type(value) and altered != value
    again = alter_values(lambda: altered)()
    assert again != altered


@pytest.mark.parametrize("value", [0, 1, 2, 3])
def test_numbers_change_sign_and_parity_and_do_not_come_back(value):
    altered = alter_values(lambda: value)()
    assert altered < 0 and altered % 2 != value % 2
    assert alter_values(lambda: altered)() != value


def test_other_values_become_bare_objects():
    assert type(alter_values(lambda: None)()) is object
    assert type(alter_values(lambda: iter([]))()) is object


def test_a_function_that_calls_itself_is_altered_for_others_only():
    namespace = {}
    source = "def total(xs):\n    return xs[0] + total(xs[1:]) if xs else 0\n" + alteration("total")
    exec(source, namespace)
    assert namespace["total"]([1, 2, 3]) == -3 * 6 - 1
    with pytest.raises(TypeError):
        namespace["total"](5)
    assert namespace["total"]([4]) == -3 * 4 - 1  # an error does not count as a call that goes on
