"""Rows of joint preferences: a malformed one is an error that names the row and the field."""

import pytest
from datasets import Dataset

from trl_multiagent.preferences.rows import check_preferences, make_row, roles_of_columns, text_columns


ROLES = ("aux", "main")
ANSWERS = ({"aux": "yes", "main": "done"}, {"aux": "", "main": "no"}, 1.5, 0.5)
GOOD = make_row({"aux": "Help:", "main": "Do:"}, *ANSWERS, item_id="a/1", chosen_correct=1.0, rejected_correct=0.0)
CHAT = make_row({"aux": [{"role": "user", "content": "Help:"}], "main": "Do:"}, *ANSWERS)


def message(content, role="assistant"):
    return [{"role": role, "content": content}]


def check(bad, good=GOOD):
    check_preferences(Dataset.from_list([good, good, {**good, **bad}]), ROLES)


def test_good_rows_pass():
    assert CHAT["aux_chosen"] == message("yes") and CHAT["main_chosen"] == "done"
    assert roles_of_columns(list(GOOD)) == ["aux", "main"]
    check({})
    check({}, CHAT)
    check({"aux_rejected": "yes"})  # one agent's answers may be the same
    check_preferences(Dataset.from_list([GOOD]).select_columns([*text_columns("aux"), *text_columns("main")]), ROLES)


@pytest.mark.parametrize(
    ("bad", "good", "problem"),
    [
        ({"aux_prompt": ""}, GOOD, "'aux_prompt' is empty"),
        ({"aux_chosen": " ", "main_chosen": ""}, GOOD, "the chosen answer is empty"),
        ({"aux_rejected": "yes", "main_rejected": "done"}, GOOD, "are the same"),
        ({"chosen_reward": None}, GOOD, "'chosen_reward' is None"),
        ({"rejected_reward": float("nan")}, GOOD, "'rejected_reward' is nan"),
        ({"rejected_reward": 1.5}, GOOD, "'chosen_reward' is 1.5, not more than 1.5"),
        ({"aux_chosen_answer": 5}, {**GOOD, "aux_chosen_answer": None}, "'aux_chosen_answer' is 5; it must be a text"),
        (
            {"aux_chosen_token_ids": [-1]},
            {**GOOD, "aux_chosen_token_ids": [5]},
            "'aux_chosen_token_ids' must be a list of token ids",
        ),
        ({"aux_chosen": []}, CHAT, r"'aux_chosen' is \[\]"),
        ({"aux_prompt": message("Help:")}, CHAT, "'aux_prompt' ends with a message of the assistant"),
        ({"aux_rejected": message("no", "user")}, CHAT, "'aux_rejected' begins with a message of 'user'"),
        ({"aux_chosen": message(None)}, CHAT, "'aux_chosen' has the message .* 'content'"),
    ],
)
def test_a_malformed_row_is_named(bad, good, problem):
    with pytest.raises(ValueError, match=f"^Row 2 of `train_dataset`: .*{problem}"):
        check(bad, good)


def test_forms_of_one_role_do_not_mix():
    for row, name, answer in ((GOOD, "aux_chosen", message("yes")), (CHAT, "aux_rejected", "no")):
        with pytest.raises(ValueError, match=f"Row 0 .*'{name}' and 'aux_prompt' must both be texts"):
            check_preferences(Dataset.from_list([{**row, name: answer}]), ROLES)


@pytest.mark.parametrize(
    ("changes", "roles", "problem"),
    [
        ({}, ("aux", "critic"), "no column 'critic_prompt', 'critic_chosen', 'critic_rejected'.*of \\['aux', 'main'"),
        ({}, ("main",), r"answers of the roles \['aux', 'main'\], but the team has \['main'\]"),
        ({"chosen_reward": ...}, ROLES, "only one of 'chosen_reward' and 'rejected_reward'"),
        ({"aux_prompt": ..., "aux_chosen": ..., "main_prompt": ...}, ROLES, r"it has answers of \[\]"),
    ],
)
def test_columns_that_do_not_fit_are_named(changes, roles, problem):
    row = {name: value for name, value in {**GOOD, **changes}.items() if value is not ...}
    with pytest.raises(ValueError, match=problem):
        check_preferences(Dataset.from_list([row]), roles)


def test_something_else_is_no_dataset():
    with pytest.raises(ValueError, match=r"`eval_dataset` has no rows"):
        check_preferences(Dataset.from_list([GOOD]).select([]), ROLES, "eval_dataset")
    with pytest.raises(TypeError, match=r"must be a `datasets\.Dataset`, got `list`"):
        check_preferences([GOOD], ROLES)
