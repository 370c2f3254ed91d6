"""Pushing and loading teams with the real Hub client, against a server on the loopback interface."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from trl_multiagent.cli import main

from forked import FORKING
from hub_client import HubClient
from hub_server import READER, WRITER, HubServer
from tiny import write_problems


ROOT = Path(__file__).resolve().parents[1]
WEIGHTS = [f"agents/{role}/model.safetensors" for role in ("aux", "main")]
TEAM_FILES = {"README.md", "team.json", *WEIGHTS, "agents/main/config.json", "agents/aux/tokenizer.json"}
# `accelerate launch` in a process that is forked from the client's, which has imported what its processes need
LAUNCH = """
import os
from pathlib import Path
from forked import run_script
pid = os.fork()
if pid == 0:
    del os.environ["HF_TOKEN"]
    os.environ.update(environment)
    run_script(["-m", "accelerate.commands.launch", *arguments], root, Path(folder), 0)
result = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
TRAINER = """
from tiny import tiny_items, tiny_trainer
def trainer(**arguments):
    arguments = {"max_steps": 2, "push_to_hub": True, "save_strategy": "steps", "save_steps": 1, **arguments}
    return tiny_trainer(folder, hub_model_id=repo_id, **arguments)
"""


@pytest.fixture(scope="module")
def server():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def client(server, tmp_path_factory):
    client = HubClient(server.environment(tmp_path_factory.mktemp("home")))
    yield client
    client.close()


def saved_weights(folder: Path) -> dict[str, bytes]:
    return {path: (folder / path).read_bytes() for path in WEIGHTS}


def test_a_team_is_pushed_and_loaded(server, client, tmp_path):
    code = """
from tiny import tiny_team
team = tiny_team()
team.chat_template_kwargs["main"] = {"effort": "low"}
team.save_pretrained(folder)
result = team.push_to_hub("user/collectors", commit_message="First try").commit_url
"""
    url = client(code, folder=str(tmp_path))
    repo = server.repos["user/collectors"]
    assert url == f"{server.url}/user/collectors/commit/{repo.refs['main']}"
    assert repo.messages == ["initial commit", "First try"] and not repo.private
    files = repo.files()
    assert {"team.json", "README.md", ".gitattributes"} == {path for path in files if "/" not in path}
    assert {path: files[path] for path in WEIGHTS} == saved_weights(tmp_path)
    assert 'AgentTeam.from_pretrained("user/collectors")' in files["README.md"].decode()

    server.requests.clear()
    code = """
import torch
from tiny import tiny_team
from trl_multiagent import AgentTeam
loaded = AgentTeam.from_pretrained("user/collectors")
equal = all(torch.equal(x, loaded.state_dict()[name]) for name, x in tiny_team().state_dict().items())
result = [loaded.roles, equal, loaded.tokenizers["aux"]("é")["input_ids"], loaded.chat_template_kwargs]
"""
    roles, equal, ids, arguments = client(code)
    assert roles == ["aux", "main"] and equal and len(ids) == 2
    assert arguments == {"aux": {}, "main": {"effort": "low"}}
    downloads = {request.partition("/resolve/main/")[2] for request in server.requests if "/resolve/main/" in request}
    assert downloads == {"team.json"}  # later requests use the commit in which it was found
    fetched = [request for request in server.requests if request.startswith("GET") and "/resolve/" in request]
    assert not any("README" in request or "training_args" in request for request in fetched)
    assert sum("safetensors" in request for request in fetched) == 2


def test_a_base_is_loaded_in_its_revision_and_a_team_from_its_branch(server, client, tmp_path):
    """
    Adapters that were trained on a branch of a base fit no other one. The snippets of the card do what the team does.
    """
    code = """
import re
import torch
from huggingface_hub import create_branch, hf_hub_download
from peft import LoraConfig
from tiny import byte_tokenizer, tiny_llama
from trl_multiagent import AgentTeam
tiny_llama().push_to_hub("user/grown")
byte_tokenizer().push_to_hub("user/grown")
create_branch("user/grown", branch="later")
tiny_llama(7).push_to_hub("user/grown", revision="later")
config = LoraConfig(target_modules="all-linear", init_lora_weights=False)
team = AgentTeam.from_pretrained("user/grown", roles=["aux", "main"], revision="later", peft_config=config)
team.save_pretrained(folder)
team.push_to_hub("user/fitted", revision="dev")
def answers(team):
    with torch.no_grad(), team.activate("main"):
        return team.agents["main"](torch.arange(65, 75)[None]).logits
with open(hf_hub_download("user/fitted", "README.md", revision="dev")) as card:
    names = {}
    for snippet in re.findall(r"```python\\n(.*?)```", card.read(), flags=re.DOTALL):
        exec(snippet, names)
with torch.no_grad():
    alone = names["model"](torch.arange(65, 75)[None]).logits
others = (answers(AgentTeam.from_pretrained(folder)), answers(names["team"]), alone)
result = [torch.equal(answers(team), other) for other in others]
"""
    assert client(code, folder=str(tmp_path)) == [True, True, True]


def test_branches_pull_requests_and_private_repositories(server, client):
    code = """
from tiny import tiny_llama, tiny_team
from trl_multiagent import AgentTeam
team = tiny_team()
team.push_to_hub("user/versions", private=True)
first = team.agents["aux"].state_dict()["lm_head.weight"].clone()
with __import__("torch").no_grad():
    team.agents["aux"].lm_head.weight += 1
team.push_to_hub("user/versions", revision="second")
pull_request = team.push_to_hub("user/versions", create_pr=True).pr_url
def head(**kwargs):
    loaded = AgentTeam.from_pretrained("user/versions", **kwargs)
    return (loaded.agents["aux"].state_dict()["lm_head.weight"] - first).mean().round().item()
result = [head(), head(revision="second"), head(revision="refs/pr/1"), pull_request]
import os
token = os.environ.pop("HF_TOKEN")  # the repository is private
try:
    result.append(head(token=reader))
finally:
    os.environ["HF_TOKEN"] = token
"""
    assert client(code, reader=READER) == [0.0, 1.0, 1.0, f"{server.url}/user/versions/discussions/1", 0.0]
    repo = server.repos["user/versions"]
    assert repo.private and set(repo.refs) == {"main", "second", "refs/pr/1"}


def test_a_push_without_permission_is_refused_before_the_training(server, client, tmp_path):
    """Even if the repository exists and can be read."""
    client("from huggingface_hub import create_repo; create_repo('user/guarded')")
    code = """
from tiny import tiny_team
result = []
for attempt in (lambda: trainer(hub_token=token), lambda: tiny_team().push_to_hub(repo_id, token=token)):
    try:
        attempt()
    except RuntimeError as error:
        result.append(str(error))
"""
    errors = client(TRAINER + code, folder=str(tmp_path), repo_id="user/guarded", token=READER)
    assert len(errors) == 2 and server.repos["user/guarded"].messages == ["initial commit"]
    for error in errors:
        assert "Cannot push to 'user/guarded'" in error and "403" in error and "hf auth login" in error


def test_an_unreachable_hub_is_reported_as_such(server, client):
    """The error does not claim that a file is missing. A model in the cache can still be loaded."""
    code = """
import huggingface_hub.constants
from tiny import byte_tokenizer, tiny_llama, tiny_team
from transformers import AutoModelForCausalLM
from trl_multiagent import AgentTeam
from trl_multiagent.models.pretrained import find_file
tiny_llama().push_to_hub("user/solo")
byte_tokenizer().push_to_hub("user/solo")
tiny_team().push_to_hub("user/far")
AgentTeam.from_pretrained("user/solo", roles=["aux", "main"])  # fills the cache
AutoModelForCausalLM.from_pretrained("user/far", subfolder="agents/main")  # caches a part of the team
attempts = {
    "no roles": lambda: AgentTeam.from_pretrained("user/far"),
    "roles": lambda: AgentTeam.from_pretrained("user/never-seen", roles=["aux", "main"]),
    "a cached model": lambda: AgentTeam.from_pretrained("user/solo", roles=["aux", "main"]).roles,
}
result = {}
try:
    AgentTeam.from_pretrained("user/nothing-here")
except OSError as error:
    result["a wrong name"] = str(error)
huggingface_hub.constants.HF_HUB_OFFLINE = True
try:
    for name, attempt in attempts.items():
        try:
            result[name] = str(attempt())
        except OSError as error:
            result[name] = str(error)
finally:
    huggingface_hub.constants.HF_HUB_OFFLINE = False
"""
    results = client(code)
    assert "'user/nothing-here' is neither an existing folder nor a repository on the Hub" in results["a wrong name"]
    problem = "'user/far' is no folder here and is not in the local cache, and the Hugging Face Hub did not answer"
    assert results["no roles"].startswith(problem)
    assert "the Hugging Face Hub did not answer" in results["roles"]
    assert results["a cached model"] == "('aux', 'main')"


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_checkpoints_are_pushed_whole(server, client, tmp_path, strategy):
    code = """
trainer = trainer(hub_strategy=strategy, hub_always_push=True, hub_token=token)
trainer.train()
trainer.push_to_hub(dataset_name="openai/openai_humaneval")
"""
    repo_id = f"user/{strategy}"
    client(TRAINER + code, folder=str(tmp_path), repo_id=repo_id, strategy=strategy, token=WRITER)
    repo = server.repos[repo_id]
    progress = ["Training in progress, step 1", "Training in progress, step 2"]
    expected = [f"{message}{part}" for message in progress for part in ("", ", checkpoint")]
    assert repo.messages == ["initial commit", *expected, "End of training"]
    for files in list(repo.commits.values())[1:]:
        assert set(files) >= TEAM_FILES | {"training_args.bin"}
        assert not {"tokenizer.json", "tokenizer_config.json", "model.safetensors"} & set(files)
        assert WRITER.encode() not in b"".join(files.values())
    files = repo.files()
    checkpoints = {"last-checkpoint"} if strategy == "checkpoint" else {"checkpoint-1", "checkpoint-2"}
    assert {path.split("/")[0] for path in files if "/" in path} == {"agents"} | checkpoints
    for folder in checkpoints:
        local = tmp_path / ("checkpoint-2" if folder == "last-checkpoint" else folder)
        names = {str(path.relative_to(local)) for path in local.rglob("*") if path.is_file()}
        assert {"optimizer.pt", "trainer_state.json", "team.json", *WEIGHTS} <= names
        assert all(files[f"{folder}/{name}"] == (local / name).read_bytes() for name in names)
    assert {path: files[path] for path in WEIGHTS} == saved_weights(tmp_path)
    card = yaml.safe_load(files["README.md"].decode().split("---")[1])
    assert card["datasets"] == "openai/openai_humaneval" and "magrpo" in card["tags"]


def test_files_do_not_change_during_a_push(server, client, tmp_path):
    """The second checkpoint is saved while the first is being sent, so the push at the end uploads it."""
    code = """
import threading
from transformers import TrainerCallback
from transformers.utils.hub import hf_api
release = threading.Event()
class Release(TrainerCallback):
    def on_save(self, args, state, control, **kwargs):
        if state.global_step == 3:
            release.set()
trainer = trainer(max_steps=3, callbacks=[Release()])
hf_api().run_as_future(release.wait)  # background pushes run one after the other, so they wait for this
trainer.train()
trainer.push_to_hub()
"""
    client(TRAINER + code, folder=str(tmp_path), repo_id="user/slow")
    repo = server.repos["user/slow"]
    assert repo.messages == ["initial commit", "Training in progress, step 1", "End of training"]
    pushed, final = list(repo.commits.values())[1:]
    for path in WEIGHTS:
        assert pushed[path] == (tmp_path / "checkpoint-1" / path).read_bytes()
        assert final[path] == (tmp_path / path).read_bytes()
    assert "| optimizer steps | 1 |" in pushed["README.md"].decode()
    assert "| optimizer steps | 3 |" in final["README.md"].decode()


def test_a_push_that_fails_at_the_end_loses_nothing(server, client, tmp_path):
    """The result is in the folder, and the command in the error message completes the push."""
    code = """
trainer = trainer(hub_strategy="end", hub_revision="dev")
trainer.train()
try:
    trainer.push_to_hub()
except RuntimeError as error:
    result = str(error)
"""
    folder = tmp_path / "a run"
    server.fail_once("POST /api/models/user/late/commit")  # the client does not retry this request
    error = client(TRAINER + code, folder=str(folder), repo_id="user/late")
    assert "was not completed" in error
    repo = server.repos["user/late"]
    assert repo.messages == ["initial commit"]
    whole = saved_weights(folder)
    command = re.search("`trl-multiagent (push .*)`", error)[1]
    client("from trl_multiagent.cli import main; main(arguments)", arguments=shlex.split(command))
    files = repo.files("dev")
    assert {path: files[path] for path in WEIGHTS} == whole
    assert set(files) >= TEAM_FILES | {"training_args.bin"}
    assert not any(path.startswith("checkpoint-") for path in files)


def test_a_push_that_fails_during_the_training_does_not_stop_it(server, client, tmp_path):
    code = """
from trl_multiagent.trainers.base import hub
messages = []
hub.logger.warning = messages.append
try:
    trainer = trainer(hub_always_push=True)
    trainer.train()
    trainer.push_to_hub()
finally:
    del hub.logger.warning
result = [trainer.state.global_step, messages]
"""
    server.fail_once("POST /api/models/user/shaky/commit")
    step, messages = client(TRAINER + code, folder=str(tmp_path), repo_id="user/shaky")
    assert step == 2
    assert len(messages) == 1 and "during the training failed" in messages[0] and "500" in messages[0]
    repo = server.repos["user/shaky"]
    assert repo.messages == ["initial commit", "Training in progress, step 2"]  # the end changes no file of the team
    files = repo.files()
    assert {path: files[path] for path in WEIGHTS} == saved_weights(tmp_path)


def test_only_a_folder_with_a_team_is_pushed(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["push", str(tmp_path), "user/none"])
    assert f"{tmp_path} holds no team.json" in capsys.readouterr().err


def test_a_push_sends_the_team_and_nothing_else(server, client, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    code = """
from pathlib import Path
folder = Path(folder)
(folder / "notes").mkdir(parents=True)
trainer = trainer(hub_always_push=True, log_completions=True, trace_steps=1)
for name in (".env", "notes/plan.txt", "wandb.json"):
    (folder / name).write_text("secret")
(folder / "config.yaml").symlink_to(folder.parent / "outside" / "secret")
trainer.train()
for name in ("optimizer.pt", ".env"):
    (folder / "agents/aux" / name).write_text("secret")
(folder / "agents/aux/vocab.txt").symlink_to(folder.parent / "outside" / "secret")
(folder / "agents/main/vocab.txt").symlink_to("tokenizer.json")
(folder / "agents/gone").symlink_to(folder.parent / "outside")
trainer.push_to_hub(dataset_name="user/data")
from trl_multiagent.cli import main
main(["push", str(folder), "user/command"])
"""
    client(TRAINER + code, folder=str(tmp_path / "run"), repo_id="user/run")
    of_agent = "config.json generation_config.json model.safetensors tokenizer.json tokenizer_config.json".split()
    expected = {"README.md", "team.json", "training_args.bin", ".gitattributes"}
    expected |= {"agents/main/vocab.txt"}
    expected |= {f"agents/{role}/{name}" for role in ("aux", "main") for name in of_agent}
    for name in ("user/run", "user/command"):
        files = server.repos[name].files()
        assert set(files) == expected and b"secret" not in files.values(), name
        assert f'AgentTeam.from_pretrained("{name}")' in files["README.md"].decode()


def test_a_recipe_in_two_processes(server, client, tiny_model, tmp_path):
    """The script is launched as users launch it. Only one process pushes, and the pushed team is the trained one."""
    data = tmp_path / "problems.jsonl"
    write_problems(data, 4)
    arguments = [
        *("--config_file", "accelerate_configs/ddp.yaml"),
        *("recipes/code_generation/train_magrpo.py", "--config"),
        *("recipes/code_generation/configs/magrpo_he_config.yaml", "--override", f"agent_model.name={tiny_model}"),
        *(f"dataset.name={data}", "dataset.type=humaneval", "dataset.train_split=train", "dataset.eval_split=null"),
        *("magrpo.push_to_hub=true", "magrpo.hub_model_id=user/recipe", f"magrpo.hub_token={WRITER}"),
        *(f"output.base_dir={tmp_path / 'runs'}", "output.save_final_model=true", "magrpo.max_steps=2"),
        *("magrpo.eval_interval=0", "magrpo.max_completion_length=8", "magrpo.logging_steps=1"),
        *("magrpo.save_strategy=no", "magrpo.learning_rate=0.01"),
    ]
    server.requests.clear()
    code = client(LAUNCH, arguments=arguments, environment=FORKING, root=str(ROOT), folder=str(tmp_path))
    assert code == 0, (tmp_path / "stderr_0").read_text()[-4000:]
    (folder,) = (tmp_path / "runs").iterdir()
    repo = server.repos["user/recipe"]
    assert repo.messages == ["initial commit", "End of training"]
    assert sum(request == "POST /api/repos/create" for request in server.requests) == 1
    files = repo.files()
    assert set(files) >= TEAM_FILES | {"config.yaml", "training_args.bin"}
    assert len([path for path in files if path.endswith(".safetensors")]) == 2  # the trained team, once
    assert yaml.safe_load(files["config.yaml"])["magrpo"]["hub_model_id"] == "user/recipe"
    assert WRITER.encode() not in b"".join(files.values())
    card = files["README.md"].decode()
    assert "CodeGenerationEnvironment(roles=('aux', 'main')" in card and "reward_version=" in card
    assert "| processes | 2 |" in card and "test_pass_rate" in card
    assert tiny_model not in card and str(tmp_path) not in card
    for target in re.findall(r"\]\(\./([^)]+)\)", card):
        assert any(path == target or path.startswith(f"{target}/") for path in files), target
    code = """
for snippet in snippets:
    exec(snippet, globals())
result = [team.roles, type(model).__name__, tokenizer.pad_token]
"""
    snippets = re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL)
    assert client(code, snippets=snippets) == [["aux", "main"], "LlamaForCausalLM", "<pad>"]
    trained = saved_weights(folder)
    assert {path: files[path] for path in WEIGHTS} == trained
    start = Path(tiny_model, "model.safetensors").read_bytes()
    assert start not in trained.values()


def test_runs_that_learn_from_preferences_push_their_team_alone(server, client, tiny_model, tmp_path):
    code = """
from preference_runs import run
for algorithm in ("madpo_iter", "marlhf"):
    push = ["--push_to_hub", "--hub_model_id", f"user/{algorithm}"]
    rounds = [] if algorithm == "marlhf" else ["--num_iterations", "1"]
    run(f"{folder}/{algorithm}", model, "4", algorithm, *push, *rounds)
"""
    client(code, folder=str(tmp_path), model=tiny_model)
    for algorithm in ("madpo_iter", "marlhf"):
        files = set(server.repos[f"user/{algorithm}"].files())
        assert TEAM_FILES <= files and "config.yaml" in files
        folders = {path.partition("/")[0] for path in files if "/" in path}
        assert folders == {"agents"}, algorithm
        assert "/tmp" not in server.repos[f"user/{algorithm}"].files()["README.md"].decode()
    assert (tmp_path / "marlhf" / "_reward_model" / "complete.json").is_file()
    assert (tmp_path / "marlhf" / "_preferences" / "collection.json").is_file()


def test_preferences_are_pushed_with_their_card_and_loaded(server, client, tmp_path):
    code = """
import datasets
from tiny import tiny_environment, tiny_items, tiny_team
from trl_multiagent.cli import main
from trl_multiagent.preferences import PreferenceConfig, collect_preferences, load_preferences
config = PreferenceConfig(output_dir=folder, preference_num_candidates=4, max_completion_length=6)
collected = collect_preferences(tiny_team(), tiny_environment(), tiny_items(4), config)
main(["push", folder, "user/preferences"])
datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = False
loaded = load_preferences("user/preferences", ("aux", "main"))
result = [len(collected), collected.to_list() == loaded.to_list()]
"""
    number, equal = client(code, folder=str(tmp_path / "collected"))
    assert number > 4 and equal
    repo = server.repos["datasets/user/preferences"]
    assert set(repo.files()) == {".gitattributes", "README.md", "data/train-00000-of-00001.parquet"}
    assert (
        repo.messages[-1] == "Upload preferences" and b"| preference_num_candidates | 4 |" in repo.files()["README.md"]
    )
    code = """
from trl_multiagent.preferences import push_preferences
(Path(folder) / "collection.json").unlink()
try:
    push_preferences(folder, "user/other")
except ValueError as error:
    result = str(error)
"""
    assert "holds no complete" in client("from pathlib import Path" + code, folder=str(tmp_path / "collected"))
    assert "datasets/user/other" not in server.repos
