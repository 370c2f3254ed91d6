"""Programs with a folder of their own, which they share with their checks. Attacks on it are in `tests/hostile`."""

import textwrap

import pytest

from trl_multiagent.code.sandbox import Program, Sandbox, SandboxError
from trl_multiagent.code.sandbox.helpers import kernel


BOX = """
import os

class Box:
    def do(self, code):
        found = {}
        try:
            exec(code, found)
        except Exception as error:
            return f"{type(error).__name__} {getattr(error, 'errno', None)}"
        return found.get("out")
"""


@pytest.fixture(scope="module")
def sandbox():
    with Sandbox(workers=2, check_timeout=2, retries=0) as sandbox:
        if not sandbox.has_folders():
            pytest.skip("no folders on this machine")
        yield sandbox


def program(*classes, source=BOX, **fields):
    """A program whose test cases have one method each; `classes` are the bodies of these methods."""
    cases = "".join(
        f"class Test{k}(unittest.TestCase):\n    def test(self):\n{textwrap.indent(textwrap.dedent(body), ' ' * 8)}\n"
        for k, body in enumerate(classes)
    )
    module = f"import os, sqlite3, tempfile, unittest, zipfile\n{cases}"
    return Program(source, "Box", module, unittest=True, folder=True, **fields)


def failures(verdict):
    return [
        check.error or check.status for check in (verdict.definitions, *verdict.checks) if check.status != "passed"
    ]


def test_a_program_and_its_checks_see_the_same_files(sandbox):
    (verdict,) = sandbox.run(
        [
            program(
                """
                box = Box()
                box.do("open('a', 'w').write('theirs')")
                with open("a") as file:
                    self.assertEqual(file.read(), "theirs")
                os.makedirs("inner/most")
                with open("inner/b", "w") as file:
                    file.write("ours")
                self.assertEqual(box.do("import os; os.rename('inner/b', 'b'); out = open('b').read()"), "ours")
                self.assertEqual(sorted(os.listdir()), ["a", "b", "inner"])
                box.do("import shutil; shutil.rmtree('inner')")
                self.assertFalse(os.path.exists("inner"))
                self.assertEqual(box.do("import os; out = os.path.abspath('a')"), os.path.abspath("a"))
                """,
                """
                Box().do("import sqlite3; x = sqlite3.connect('x.db'); x.execute('create table t (a)'); x.commit()")
                own = sqlite3.connect("x.db")
                own.execute("insert into t values (3)")
                own.commit()
                read = "import sqlite3; out = [*sqlite3.connect('x.db').execute('select a from t')]"
                self.assertEqual(Box().do(read), [(3,)])
                """,
                """
                Box().do("import zipfile; zipfile.ZipFile('z.zip', 'w').writestr('in', 'packed')")
                zipfile.ZipFile("z.zip").extractall("out")
                self.assertEqual(os.listdir("out"), ["in"])
                os.chmod("z.zip", 0o400)  # the checks may do that, the program may not
                self.assertEqual(Box().do("open('z.zip', 'a')"), "PermissionError 13")
                self.assertEqual(Box().do("import os; os.chmod('z.zip', 0o600)"), "PermissionError 1")
                """,
            )
        ]
    )
    assert failures(verdict) == [] and verdict.suspicious == ("os.chmod",)


def test_the_folder_is_empty_for_every_process(sandbox):
    nest = (
        "for k in range(25): os.mkdir('d' * 200, dir_fd=at); at = os.open('d' * 200, 0, dir_fd=at)"  # 5,000 characters
    )
    leave = f"""
        Box().do("import os; os.makedirs('a/b/c', 0o300); open('a/f', 'w').close(); open('.g', 'w').close()")
        self.assertEqual(Box().do({f"import os; at, out = None, 1{chr(10)}{nest}"!r}), 1)
        open("h", "w").close()
        os.mkdir("i", 0)
    """
    see = "self.assertEqual((Box().do('import os; out = os.listdir()'), os.listdir()), ([], []))"
    lost = (
        f"{see}\nopen('j', 'w').close()\ntry:\n    Box().do('import os; os._exit(0)')\nexcept BaseException:\n    pass"
    )
    programs = [program(see, leave, see, lost, see, source=f"{BOX}\n# {k}") for k in range(4)]
    for verdict in sandbox.run(programs):
        assert [check.status for check in verdict.checks] == ["passed", "passed", "passed", "error", "passed"]


def test_what_the_folder_holds_is_bounded(sandbox):
    (verdict,) = sandbox.run(
        [
            program(
                """
                count = "out = 0\\ntry:\\n    while True:\\n        open(f'f{out}', 'w').close()\\n        out += 1\\n"
                count += "except OSError: pass"
                self.assertEqual(Box().do(count), 255)
                """,
                f"""
                fill = "out = 0\\ntry:\\n    while True:\\n"
                fill += "        with open(f'f{{out}}', 'wb') as f: f.write(bytes(1 << 20))\\n"
                fill += "        out += 1\\n"
                self.assertEqual(Box().do(fill + "except OSError: pass"), {kernel.FOLDER_BYTES} >> 20)
                """,
                f"""
                self.assertEqual(Box().do("open('f', 'wb').truncate({kernel.FOLDER_BYTES})"), None)
                self.assertEqual(Box().do("open('f', 'wb').truncate({kernel.FOLDER_BYTES} + 1)"), "OSError 27")
                """,
            )
        ]
    )
    assert failures(verdict) == []


def test_nobody_waits_for_a_locked_database(sandbox):
    lock = (
        "import sqlite3; x = sqlite3.connect('x.db'); x.execute('create table if not exists t (a)'); "
        "x.execute('insert into t values (1)')"
    )
    held = f"Box().do({lock + '; Kept = __builtins__; Kept[str(x)] = x'!r})\n"
    waits = f"{lock}\nself.assertEqual(Box().do({lock!r}), 'OperationalError None')"
    (verdict,) = sandbox.run([program(held + "sqlite3.connect('x.db').execute('drop table t')", waits)])
    assert failures(verdict) == ["OperationalError: database is locked"] and verdict.seconds < 2


def test_files_that_checks_leave_open_take_no_space_from_the_next_program(sandbox):
    fill = f'self.assertEqual(Box().do(\'open("f", "wb").write(bytes({kernel.FOLDER_BYTES}))\'), None)'
    programs = [program(f"{fill}\nTest0.kept = open('f'), Test0", source=f"{BOX}\n# {k}") for k in range(3)]
    with Sandbox(workers=1) as single:
        assert [failures(verdict) for verdict in single.run(programs)] == [[]] * 3


def test_programs_without_a_folder_have_no_files(sandbox):
    acts = dict.fromkeys(("open('x', 'w')", "import os; os.listdir()"), "PermissionError 1")
    acts["import sqlite3"] = "ModuleNotFoundError None"
    wanted = [f"assert do({act!r}) == {error!r}" for act, error in acts.items()]
    plain = [Program(f"{BOX}\ndo = Box().do\n# {k}", "do", "\n".join(wanted)) for k in range(3)]
    see = program('self.assertEqual(Box().do(\'open("x", "w").close()\'), None)')
    assert [failures(verdict) for verdict in sandbox.run([plain[0], see, *plain[1:]])] == [[]] * 4


def test_folders_need_namespaces():
    with Sandbox(workers=1, max_tier="seccomp") as weak:
        assert not weak.has_folders()
        with pytest.raises(SandboxError, match="needs a folder, which the sandbox tier 'seccomp' cannot give"):
            weak.run([program("Box()")])
