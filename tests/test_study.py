import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cloister.errors import ParameterError
from cloister.study import MOST_STEPS, Party, Step, Study, check_study, format_study, parse_study

TEXT = """\
name = "three-hospitals"
workflow = "bin-values"
mode = "hardened"
seed = 7
timeout = 30
patience = 3600.0

[parties]
hub = "coordinator"
basel = "site"
lugano = "site"
vienna = "site"
helper = "auxiliary"

[parameters]
n_bins = 51
layer = "counts"
weights = [1, 2.5]

[network]
host = "hub.example.org"
port = 8002

[keys]
basel = "{}"
lugano = "{}"
""".format("ab" * 32, "cd" * 32)
STUDY = parse_study(TEXT)


def test_a_study_is_read():
    assert STUDY.coordinator == "hub"
    assert STUDY.sites == ("basel", "lugano", "vienna")
    assert STUDY.auxiliaries == ("helper",)
    assert STUDY.parameters == {"n_bins": 51, "layer": "counts", "weights": [1, 2.5]}
    assert STUDY.keys == {"basel": b"\xab" * 32, "lugano": b"\xcd" * 32}
    assert (STUDY.seed, STUDY.timeout, STUDY.patience, STUDY.network["port"]) == (7, 30, 3600.0, 8002)


def test_what_may_be_left_out():
    study = parse_study('name = "n"\nworkflow = "w"\n[parties]\nh = "coordinator"\na = "site"')
    assert (study.mode, study.seed, study.timeout, study.parameters, study.keys) == ("hardened", 0, 60.0, {}, {})


def test_format_and_parse_are_inverse():
    assert parse_study(format_study(STUDY)) == STUDY
    assert parse_study(format_study(STUDY)).digest == STUDY.digest


NAMES = st.from_regex(r"[a-z][a-z0-9-]{0,31}", fullmatch=True)
LETTERS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
SIMPLE = st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False) | LETTERS
TABLE = st.dictionaries(LETTERS, SIMPLE | st.lists(SIMPLE | st.lists(SIMPLE, max_size=2), max_size=3), max_size=4)


@st.composite
def studies(draw):
    hub, *rest = draw(st.lists(NAMES, min_size=2, max_size=6, unique=True))
    roles = ["site", *(draw(st.sampled_from(["site", "auxiliary"])) for _ in rest[1:])]
    parties = dict(zip((hub, *rest), ("coordinator", *roles), strict=True))
    return Study(
        name=draw(LETTERS.filter(lambda x: x.strip() and x.isprintable())),
        workflow=draw(LETTERS.filter(bool)),
        parties=parties,
        mode=draw(st.sampled_from(["hardened", "published", "plain"])),
        parameters=draw(TABLE),
        seed=draw(st.integers(-(2**40), 2**70)),
        timeout=draw(st.floats(1e-3, 1e8) | st.integers(1, 10**8)),
        patience=draw(st.floats(1e-3, 1e8)),
        colluders=draw(st.integers(0, max(0, roles.count("site") - 2))),
        network=draw(TABLE),
        keys={p: draw(st.binary(min_size=32, max_size=32)) for p in parties if draw(st.booleans())},
    )


@settings(max_examples=100, deadline=None)
@given(study=studies())
def test_any_study_survives_its_file(study):
    again = parse_study(format_study(study))
    assert again == study
    assert again.digest == study.digest


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"name": ""}, "'name'"),
        ({"name": 3}, "'name'"),
        ({"workflow": None}, "'workflow'"),
        ({"workflow": ["a"]}, "'workflow'"),
        ({"mode": "soft"}, "'mode'"),
        ({"mode": []}, "'mode'"),
        ({"timeout": 0}, "'timeout'"),
        ({"timeout": -1.0}, "'timeout'"),
        ({"timeout": float("nan")}, "'timeout'"),
        ({"timeout": float("inf")}, "'timeout'"),
        ({"timeout": True}, "'timeout'"),
        ({"timeout": "60"}, "'timeout'"),
        ({"patience": 0}, "'patience'"),
        ({"seed": 1.0}, "'seed'"),
        ({"seed": True}, "'seed'"),
        ({"seed": "1"}, "'seed'"),
        ({"colluders": -1}, "'colluders'"),
        ({"colluders": True}, "'colluders'"),
        ({"colluders": 1.0}, "'colluders'"),
        ({"colluders": 2}, "'colluders' can be 1 at most with 3 sites, found 2"),
        ({"parties": {"hüb": "coordinator", "a": "site"}}, "'hüb'"),
        ({"parties": {"_hub": "coordinator", "a": "site"}}, "'_hub'"),
        ({"parties": {"hub": "coordinator", "USZ": "site", "usz": "site"}, "keys": {}}, "differ by case only"),
        ({"parties": {"hub": "coordinator", "a b": "site"}}, "'a b'"),
        ({"parties": {"hub": "coordinator", "a" * 33: "site"}}, "a" * 33),
        ({"parties": {"hub": "coordinator", "": "site"}}, r"\[parties\] ''"),
        ({"parties": {"hub": "coordinator", "a": "sight"}}, r"\[parties\] a"),
        ({"parties": {"hub": "coordinator", "a": ["site"]}}, r"\[parties\] a"),
        ({"parties": {"a": "site"}}, r"\[parties\] needs exactly one coordinator, found 0"),
        ({"parties": {"a": "coordinator", "b": "coordinator", "c": "site"}}, "found 2"),
        ({"parties": {"hub": "coordinator"}}, r"\[parties\] has no site"),
        ({"parties": {}}, r"\[parties\]"),
        ({"keys": {"stranger": bytes(32)}}, r"\[keys\] stranger"),
        ({"keys": {"basel": bytes(31)}}, r"\[keys\] basel"),
        ({"keys": {"basel": "ab" * 32}}, r"\[keys\] basel"),
        ({"parameters": {"n_bins": {"a": 1}}}, r"\[parameters\] n_bins"),
        ({"parameters": {"x": float("nan")}}, r"\[parameters\] x"),
        ({"parameters": {"x": [1, None]}}, r"\[parameters\] x"),
        ({"parameters": {"x": object()}}, r"\[parameters\] x"),
        ({"network": {"host": {"a": 1}}}, r"\[network\] host"),
    ],
)
def test_every_error_names_the_key(changes, key):
    with pytest.raises(ParameterError, match=key):
        dataclasses.replace(STUDY, **changes)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT.replace('name = "three-hospitals"\n', ""), "'name' is missing"),
        (TEXT.replace('workflow = "bin-values"\n', ""), "'workflow' is missing"),
        (TEXT.partition("[parties]")[0], "'parties' is missing"),
        ("colour = 1\n" + TEXT, "unknown key 'colour'; known are"),
        (TEXT + "\n[paramters]\nx = 1", "unknown key 'paramters'"),
        (TEXT.partition("[parties]")[0] + "parties = 3", r"\[parties\] must be a table"),
        (TEXT.partition("[parameters]")[0].replace("[parties]", "parameters = 1\n[parties]"), r"\[parameters\] must"),
        (TEXT.replace('lugano = "site"', 'basel = "site"'), "'basel' stands twice; two parties"),
        (TEXT + f'lugano = "{"00" * 32}"', "'lugano' stands twice"),
        (TEXT + "lugano = 3\n", "'lugano' stands twice"),
        (TEXT + "\n[parties]\n", "not valid TOML"),
        (TEXT.replace('"coordinator"', "coordinator"), "not valid TOML"),
        (TEXT.replace("ab" * 32, "xy" * 32), r"\[keys\] basel must be 64 hexadecimal digits"),
        (TEXT.replace("ab" * 32, "ab" * 31), r"\[keys\] basel must be 64 hexadecimal digits"),
        (TEXT.replace('"' + "ab" * 32 + '"', "12"), r"\[keys\] basel must be 64 hexadecimal digits"),
        (TEXT.replace("seed = 7", "seed = " + "7" * 5000), "not valid TOML"),
        (TEXT.replace("[1, 2.5]", "[" * 20_000), "not valid TOML"),
        (TEXT.replace("n_bins = 51", "n_bins = 2020-01-01"), r"\[parameters\] n_bins"),
        (TEXT.replace("n_bins = 51", "n_bins = nan"), r"\[parameters\] n_bins"),
        ("", "'name' is missing"),
    ],
)
def test_every_error_of_a_file_names_the_file_and_the_key(text, said):
    with pytest.raises(ParameterError, match=said) as e:
        parse_study(text, "our-study.toml")
    assert str(e.value).startswith("our-study.toml")


def test_loading(tmp_path):
    path = tmp_path / "study.toml"
    with pytest.raises(ParameterError, match="there is no study file"):
        Study.load(path)
    path.write_bytes(b"\xff\xfe\0")
    with pytest.raises(ParameterError, match="cannot be read as text"):
        Study.load(path)
    with pytest.raises(ParameterError, match="cannot be read"):
        Study.load(tmp_path)
    path.write_text(TEXT)
    assert Study.load(str(path)) == STUDY


CHANGED = {
    "governance": {"purpose": "another"},
    "labels": {"T_CD4": "CD4 T cells"},
    "ontology": {"version": "2026-03-26"},
    "name": "other",
    "workflow": "find-outliers",
    "parties": {**STUDY.parties, Party("bern"): "site"},
    "mode": "published",
    "parameters": {**STUDY.parameters, "n_bins": 52},
    "seed": 8,
    "timeout": 31,
    "patience": 1.0,
    "colluders": 1,
    "keys": {**STUDY.keys, Party("basel"): bytes(32)},
}


def test_the_digest_changes_with_every_field_but_the_network():
    assert CHANGED.keys() == {f.name for f in dataclasses.fields(Study)} - {"network", "steps", "at"}
    digests = {STUDY.digest} | {dataclasses.replace(STUDY, **{k: v}).digest for k, v in CHANGED.items()}
    assert len(digests) == len(CHANGED) + 1
    assert dataclasses.replace(STUDY, network={"host": "elsewhere"}).digest == STUDY.digest


@pytest.mark.parametrize(
    ("n", "colluders", "needed"), [(3, 0, 2), (3, 1, 3), (4, 0, 3), (4, 1, 3), (5, 1, 4), (5, 3, 5)]
)
def test_a_quorum_is_more_than_half_of_all_and_of_the_colluders(n, colluders, needed):
    study = Study("x", "bin-values", {"hub": "coordinator"} | {f"s{i}": "site" for i in range(5)}, colluders=colluders)
    assert study.agreement.quorum(n) == needed
    assert 2 * needed > n + colluders or needed == n
    assert 2 * (needed - 1) <= n + colluders  # and no larger than that


def test_the_digest_does_not_depend_on_how_the_same_is_written():
    turned = dict(reversed(STUDY.parties.items()))
    assert dataclasses.replace(STUDY, parties=turned, timeout=30.0).digest == STUDY.digest
    swapped = {**STUDY.parties, "basel": "auxiliary", "helper": "site"}
    assert dataclasses.replace(STUDY, parties=swapped).digest != STUDY.digest


def mutated(rng):
    data = list(TEXT)
    for _ in range(rng.randrange(1, 8)):
        at = rng.randrange(len(data))
        way = rng.randrange(5)
        if way == 0:
            data[at] = chr(rng.randrange(32, 127))
        elif way == 1:
            del data[at : at + rng.randrange(1, 30)]
        elif way == 2:
            data[at:at] = rng.choice(['"', "=", "[", "]", "\n", "{}", "1e999", "\x7f", "'''", "true", "é"])
        elif way == 3:
            end = at + rng.randrange(1, 60)
            data[at:at] = data[at:end]
        else:
            data[at:at] = chr(rng.randrange(0x250))
        data = data or [" "]
    return "".join(data)


def test_mutated_files_are_read_or_refused_by_a_parameter_error():
    rng = random.Random(0)
    read = refused = 0
    for _ in range(2000):
        try:
            check_study(parse_study(mutated(rng)))
            read += 1
        except ParameterError:
            refused += 1
    assert min(read, refused) > 20


# ---- several steps ---------------------------------------------------------------------------------------------------

STEPS = """\
name = "story"
seed = 3

[parties]
hub = "coordinator"
basel = "site"
lugano = "site"

[[step]]
workflow = "shared-pca"

[[step]]
name = "labels"
workflow = "map-labels"
mode = "published"
options = { query = "basel", use_rep = "X_shared_pca" }
"""
STORY = parse_study(STEPS)


def test_the_digest_of_one_workflow_is_the_one_that_was_approved_before_there_were_steps():
    study = Study("n", "bin-values", {Party("h"): "coordinator", Party("a"): "site"}, parameters={"n_bins": 9})
    assert study.digest.hex() == "f5f3f2a3520bd20f50c55d3a035b0638c78db771923710bbaf50f3384b3587e8"
    assert study.parts == (study,)
    assert study.whole is study
    assert (study.label, study.place) == ("bin-values", "")


def test_a_study_of_several_steps_is_read_and_each_step_is_a_study():
    assert STORY.steps == (
        Step("shared-pca", name="shared-pca"),
        Step("map-labels", "published", {"query": "basel", "use_rep": "X_shared_pca"}, "labels"),
    )
    one, two = STORY.parts
    assert (one.workflow, one.mode, one.parameters, one.seed) == ("shared-pca", "hardened", {}, 3)
    assert (two.workflow, two.mode, two.label) == ("map-labels", "published", "labels")
    assert two.parameters == {"query": "basel", "use_rep": "X_shared_pca"}
    assert two.place == "step 2 of 2 (labels)"
    assert one.whole == two.whole == STORY
    assert two.parts == (two,)


def test_steps_are_written_and_read_back_and_so_is_one_of_them():
    for study in (STORY, *STORY.parts, STORY.with_keys({Party("basel"): bytes(32)})):
        assert parse_study(format_study(study)) == study
        assert parse_study(format_study(study)).digest == study.digest


def test_one_digest_covers_all_steps_and_each_step_has_its_own():
    first, second = STORY.steps
    lists = [
        (second, first),
        (first,),
        (first, second, dataclasses.replace(first, name="again")),
        (dataclasses.replace(first, options={"n_components": 7}), second),
        (dataclasses.replace(first, mode="plain"), second),
        (dataclasses.replace(first, name="space"), second),
    ]
    others = [dataclasses.replace(STORY, steps=steps) for steps in lists]
    everything = [x.digest for study in (STORY, *others) for x in (study, *study.parts)]
    assert len(set(everything)) == len(everything)
    assert STORY.agreement.places[STORY.parts[1].digest] == "step 2 of 2 (labels)"
    assert others[0].parts[0].digest not in STORY.parts[0].agreement.places


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (STEPS.replace("seed = 3", 'workflow = "bin-values"'), "'workflow' and \\[\\[step\\]\\] exclude each other"),
        (STEPS.replace("seed = 3", 'mode = "plain"'), "'mode' and"),
        (STEPS + '[[step]]\nworkflow = "shared-pca"', "two steps are called 'shared-pca'"),
        (STEPS + '[[step]]\nname = "x"', "step\\]\\] 3: 'workflow' is missing"),
        (STEPS + '[[step]]\nworkflow = "bin-values"\nn_bins = 8', "3: unknown key 'n_bins'; known are mode, name"),
        (STEPS + '[[step]]\nworkflow = "bin-values"\noptions = 8', "3: 'options' must be a table"),
        (STEPS + '[[step]]\nworkflow = "bin-values"\nmode = "fast"', "3: 'mode' must be one of"),
        (STEPS + '[[step]]\nworkflow = "bin-values"\nname = "A B"', "3: 'A B' is not a valid step name"),
        (STEPS + '[[step]]\nworkflow = "bin-values"\noptions = { x = nan }', "3: options: x must be a finite number"),
        (STEPS + "[[step]]\nworkflow = 3", "3: 'workflow' must be a text"),
        (STEPS.replace("[[step]]", "[step]", 1).replace("[[step]]", "[other]"), "unknown key 'other'"),
        ("step = 3\n" + STEPS.partition("[[step]]")[0], "write \\[\\[step\\]\\] above each"),
        ("step = []\n" + STEPS.partition("[[step]]")[0], "'workflow' must be a text"),
        ("at = 3\n" + STEPS, "'at' must be the number of a step"),
        ("at = true\n" + STEPS, "'at' must be the number of a step"),
        (STEPS + "".join(f'[[step]]\nname = "s{i}"\nworkflow = "w"\n' for i in range(MOST_STEPS)), "at most 20 steps"),
    ],
)
def test_what_is_wrong_in_a_step_is_said_by_its_number(text, says):
    with pytest.raises(ParameterError, match=says):
        parse_study(text)


def test_a_step_may_not_differ_from_the_list_it_stands_in():
    with pytest.raises(ParameterError, match="stand in its steps"):
        dataclasses.replace(STORY.parts[0], mode="plain")
    with pytest.raises(ParameterError, match="stand in its steps"):
        dataclasses.replace(STORY, workflow="bin-values")


@pytest.mark.parametrize("name", ["\x1b[31mred", "two\nlines", " ", "x" * 201])
def test_a_name_is_one_printable_line(name):
    with pytest.raises(ParameterError, match="'name' must be one line of text"):
        Study(name, "bin-values", {"hub": "coordinator", "a": "site", "b": "site"})
