from trl_multiagent.console import markdown_table, text_table


def test_tables():
    rows = [["a", "number", "x"], ["long name", "1", "2.50"]]
    assert text_table(rows) == ["a          number     x", "-----------------------", "long name       1  2.50"]
    assert markdown_table([["a", "b"], ["x|y", 0.5]]) == "| a | b |\n| --- | --- |\n| x\\|y | 0.5 |\n"
