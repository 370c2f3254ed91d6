"""Texts that are longer than the learned positions of a model are refused, before anything is sampled if possible."""

import dataclasses

import pytest
import torch
from datasets import Dataset
from evaluated import TASK, LetterEnvironment, evaluate
from pairs import pair_config, pair_trainer, pairs
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    OPTConfig,
    OPTForCausalLM,
    RobertaConfig,
    RobertaForSequenceClassification,
)

from trl_multiagent import AgentTeam, FunctionEnvironment, IACConfig, IACTrainer, JointRewardConfig, JointRewardTrainer
from trl_multiagent.environments.reward_models import JointRewardModel
from trl_multiagent.models import positions
from trl_multiagent.models.positions import TooLongError, check_prompts, learned_positions
from trl_multiagent.preferences import PreferenceConfig, collect_preferences
from trl_multiagent.runs.prepared import check_team, parse_recipe

from tiny import byte_tokenizer, count_reward, other_model, tiny_environment, tiny_items, tiny_llama, tiny_trainer


ROLES = ("aux", "main")
POSITIONS = 256  # of `other_model("gpt2")`


def team_of(model) -> AgentTeam:
    """The first agent reads long texts; the other one is the model."""
    return AgentTeam({"aux": tiny_llama(), "main": model}, {role: byte_tokenizer() for role in ROLES})


@pytest.fixture
def gpt2():
    return other_model("gpt2")


@pytest.fixture
def short_rope():
    """A model with computed positions. `max_position_embeddings` is no limit."""
    return tiny_llama(max_position_embeddings=64)


class Long(FunctionEnvironment):
    """The last item has a prompt of a given number of tokens. Nothing may be scored."""

    def __init__(self, length, turn=1):
        super().__init__(dict.fromkeys(ROLES, "Task {x}:"), count_reward, transition=self.prompts)
        self.length, self.turn, self.scored = length, turn, 0

    def prompts(self, item, history):
        long = len(history) + 1 == self.turn and item["x"] == "11"
        return dict.fromkeys(ROLES, "p" * self.length if long else "Task:")

    def score(self, items, *rest):
        self.scored += len(items)
        return super().score(items, *rest)


ITEMS = Dataset.from_dict({"x": [str(k) for k in range(12)]})
TOO_LONG = f"A prompt of 'main' has 249 tokens and its completion may have 8, but .* only {POSITIONS} positions.*'pppp"


def test_learned_positions(gpt2, short_rope):
    size = {"vocab_size": 258, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    opt = OPTForCausalLM(OPTConfig(ffn_dim=16, max_position_embeddings=64, word_embed_proj_dim=16, **size))
    roberta = RobertaForSequenceClassification(
        RobertaConfig(intermediate_size=16, max_position_embeddings=66, num_labels=1, pad_token_id=1, **size)
    )
    for model, limit in ((opt, 64), (roberta, 64)):
        assert learned_positions(model) == limit
        ids = torch.full((1, limit), 5)
        model(ids, attention_mask=torch.ones_like(ids))
        with pytest.raises((IndexError, RuntimeError)):
            ids = torch.full((1, limit + 1), 5)
            model(ids, attention_mask=torch.ones_like(ids))
    assert learned_positions(gpt2) == POSITIONS and learned_positions(short_rope) is None


@pytest.mark.parametrize("config", [{}, {"trainer": IACTrainer, "config": IACConfig}])
def test_online_trainers(tmp_path, gpt2, short_rope, config):
    for place in ("train_dataset", "eval_dataset"):
        with pytest.raises(TooLongError, match=TOO_LONG):
            tiny_trainer(tmp_path, team_of(gpt2), Long(249), **{"train_dataset": ITEMS.select(range(4)), place: ITEMS})
    tiny_trainer(tmp_path, team_of(short_rope), Long(249), train_dataset=ITEMS.select([10, 11]), **config).train()
    fits = tiny_trainer(tmp_path, team_of(gpt2), Long(248), train_dataset=ITEMS.select([10, 11]), **config)
    fits.train()
    with pytest.raises(TooLongError, match="A completion may have 256 tokens"):
        tiny_trainer(tmp_path, team_of(gpt2), Long(1), train_dataset=ITEMS, max_completion_length=256)


def test_a_later_prompt_is_refused_when_it_is_there(tmp_path, gpt2):
    trainer = tiny_trainer(
        tmp_path, team_of(gpt2), Long(249, turn=2), train_dataset=ITEMS.select([10, 11]), num_turns=2
    )
    with pytest.raises(TooLongError, match=r"A prompt of 'main' has 2[5-9]. tokens .* shorten the prompt or its"):
        trainer.train()
    assert trainer.environment.scored == 8  # in the first turn


def test_a_model_with_computed_positions_is_warned_beyond_them(short_rope, monkeypatch):
    warnings = []
    monkeypatch.setattr(positions.logger, "warning_once", warnings.append)
    check_prompts("main", short_rope, ["p"], [50], 14)
    assert warnings == []
    check_prompts("main", short_rope, ["p"], [50], 15)
    assert warnings[0].startswith(
        "A prompt of 'main' and its completion may have 65 tokens, but its model was made for 64"
    )


def test_collaborate(gpt2, short_rope):
    with pytest.raises(TooLongError, match=TOO_LONG):
        team_of(gpt2).collaborate(ITEMS, Long(249), max_new_tokens=8)
    (turn,) = team_of(gpt2).collaborate(ITEMS[11], Long(248), max_new_tokens=8)
    assert turn.prompts["main"] == "p" * 248
    team_of(short_rope).collaborate(ITEMS[11], Long(249), max_new_tokens=8)


def test_evaluate(tmp_path, gpt2, capsys):
    team_of(gpt2).save_pretrained(tmp_path / "team")
    task = dataclasses.replace(TASK, make_environment=lambda settings: Wide(ROLES))
    with pytest.raises(SystemExit) as exit_info:
        evaluate(tmp_path / "team", "--output_dir", tmp_path / "results", "--split", "test", task=task)
    assert exit_info.value.code == 2
    assert "evaluate: error: A prompt of 'main' has 251 tokens" in capsys.readouterr().err.splitlines()[-1]
    assert not list((tmp_path / "results").rglob("transcripts*.jsonl"))


class Wide(LetterEnvironment):
    """The last item of the evaluation has a long prompt."""

    def prompts(self, item, history):
        return dict.fromkeys(ROLES, "w" * (251 if item["x"] == tiny_items()["x"][6] else 9))


def test_collection(tmp_path, gpt2):
    environment = Long(249)
    config = PreferenceConfig(
        str(tmp_path), preference_num_candidates=2, max_completion_length=8, items_per_chunk=4, disable_tqdm=True
    )
    with pytest.raises(TooLongError, match=TOO_LONG):
        collect_preferences(team_of(gpt2), environment, ITEMS, config)
    assert environment.scored == 0


def test_madpo(tmp_path, gpt2, short_rope):
    rows = pairs(ROLES, 4)
    long = rows.to_list()
    long[3]["main_rejected"] = "r" * 400
    long = Dataset.from_list(long)
    with pytest.raises(TooLongError, match=r"Row 3 of `train_dataset`: .*'main' have 4\d\d tokens.*`max_length`"):
        pair_trainer(tmp_path, team_of(gpt2), train_dataset=long)
    with pytest.raises(TooLongError, match="Row 3 of `eval_dataset`"):
        pair_trainer(tmp_path, team_of(gpt2), train_dataset=rows, eval_dataset=long, max_length=None)
    pair_trainer(tmp_path, team_of(gpt2), train_dataset=long, max_length=POSITIONS).train()
    pair_trainer(tmp_path, team_of(short_rope), train_dataset=long, max_length=None, max_steps=1).train()
    with pytest.raises(TooLongError, match="A prompt of 'main' has 253"):
        pair_trainer(
            tmp_path,
            team_of(gpt2),
            train_dataset=rows,
            eval_dataset=ITEMS,
            environment=Long(253),
            max_completion_length=8,
        )


def test_reward_models(tmp_path):
    config = GPT2Config(vocab_size=258, n_positions=POSITIONS, n_embd=32, n_layer=2, n_head=2, num_labels=1)
    config.pad_token_id, config.eos_token_id = 257, 256
    rows = pairs(ROLES, 8).to_list()
    rows[5]["main_prompt"] = "m" * 300

    def trainer(rows, **settings):
        torch.manual_seed(0)
        return JointRewardTrainer(
            GPT2ForSequenceClassification(config),
            pair_config(tmp_path, JointRewardConfig, eval_fraction=0, **settings),
            Dataset.from_list(rows),
            processing_class=byte_tokenizer(),
        )

    with pytest.raises(TooLongError, match=r"A text has \d+ tokens, but the reward model has only 256 positions"):
        trainer(rows)
    done = trainer(rows, max_length=POSITIONS)
    done.train()
    rows[5]["main_chosen"] = "c" * 300
    with pytest.raises(TooLongError, match="A text has"):  # its answers alone are that long
        trainer(rows, max_length=POSITIONS)
    reward = JointRewardModel(done.model, byte_tokenizer())
    assert len(reward([{"aux": "a", "main": "m" * 500}], [{"aux": "a", "main": "b"}])) == 1
    with pytest.raises(TooLongError, match=r"but the reward model .* has only 256 positions"):
        reward([{"aux": "a", "main": "m"}], [{"aux": "a", "main": "b" * 300}])


def test_a_recipe_knows_it_before_a_model_is_loaded(tmp_path, gpt2):
    gpt2.save_pretrained(tmp_path / "gpt2")
    byte_tokenizer().save_pretrained(tmp_path / "gpt2")
    recipe = parse_recipe(
        "magrpo",
        TASK,
        [
            "--model_name",
            str(tmp_path / "gpt2"),
            "--override",
            "magrpo.num_agents=2",
            "magrpo.max_completion_length=256",
        ],
    )
    message = r"`agent_model.name: .*gpt2`: A completion may have 256 tokens, but the model of 'aux' has"
    with pytest.raises(ValueError, match=message):
        check_team(recipe, ROLES)


def test_the_environment_keeps_its_state(tmp_path, gpt2):
    """Its prompts are asked for once more than in a training of another model."""

    class Counting(type(tiny_environment())):
        calls = 0

        def prompts(self, item, history):
            self.calls += 1
            return super().prompts(item, history)

        def state_dict(self):
            return {"calls": self.calls}

        def load_state_dict(self, state):
            self.calls = state["calls"]

    environment = Counting(dict.fromkeys(ROLES, "Task {x}:"), count_reward)
    tiny_trainer(tmp_path, team_of(gpt2), environment)
    assert environment.calls == 0


@pytest.mark.parametrize(
    ("rope", "lengths", "number"),
    [
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, [50, 56], 0),
        ({"rope_type": "longrope", "original_max_position_embeddings": 64}, [50, 57], 1),
        ({"rope_type": "dynamic", "factor": 2.0}, [121], 1),
        ({"rope_type": "linear", "factor": 2.0}, [121], 0),
    ],
)
def test_rotary_positions_that_depend_on_the_batch_are_named(rope, lengths, number, monkeypatch):
    """Completions may have 8 tokens, and the model has 128 positions where `rope` has no number."""
    if rope["rope_type"] == "longrope":
        rope = {**rope, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    model, said = tiny_llama(max_position_embeddings=128, rope_parameters={"rope_theta": 1e4, **rope}), []
    monkeypatch.setattr(positions.logger, "warning_once", said.append)
    check_prompts("main", model, [], lengths, 8)
    assert len(said) == number and all("'main'" in text and "beyond" in text for text in said)
    if number:  # a row alone, and beside a longer one
        row = torch.arange(20).unsqueeze(0)
        long = torch.arange(140).remainder(200).unsqueeze(0)
        mask = torch.ones(2, 140, dtype=torch.long)
        mask[0, 20:] = 0
        with torch.no_grad():
            alone = model(row).logits
            beside = model(torch.cat([torch.nn.functional.pad(row, (0, 120)), long]), attention_mask=mask).logits
        assert not torch.allclose(alone[0], beside[0, :20], atol=1e-5)
