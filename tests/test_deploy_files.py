"""The files in deploy/: what they grant. No container engine and no cluster is needed, and none is used."""

import json
import re
from pathlib import Path

import pytest

from cloister.deploy.kit import Kit
from cloister.deploy.provision import provision
from cloister.study import Study

yaml = pytest.importorskip("yaml")
pytest.importorskip("nvflare")
DEPLOY = Path(__file__).parents[1] / "deploy"
CHART = DEPLOY / "helm" / "cloister"


# ---- images ----------------------------------------------------------------------------------------------------------


def stages():
    text = (DEPLOY / "container" / "Dockerfile").read_text()
    found = re.findall(r"^FROM (\S+) AS (\w+)\n(.*?)(?=^FROM |\Z)", text, re.MULTILINE | re.DOTALL)
    return {name: (base, body) for base, name, body in found}


def test_both_images_run_as_users_of_their_own():
    made = stages()
    assert made["service"][0] == made["carrier"][0] == "base"
    assert re.search(r"^USER 61201:61202$", made["service"][1], re.MULTILINE)
    assert re.search(r"^USER 61202:61202$", made["carrier"][1], re.MULTILINE)
    assert "/kit" not in made["carrier"][1]
    assert '"-m", "cloister.deploy.sandbox", "cloister.deploy.carrier"' in made["carrier"][1]


# ---- compose ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def compose():
    return yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())


def test_services_have_no_network_and_carriers_no_kit(compose):
    services = {n: s for n, s in compose["services"].items() if not n.endswith("-carrier")}
    assert set(services) == {"hub", "basel", "lugano", "vienna"}
    for name, service in services.items():
        assert service["network_mode"] == "none"
        assert service["volumes"] == [f"./kits/{name}:/kit", f"{name}:/run/cloister"]
        carrier = compose["services"][f"{name}-carrier"]
        assert [*carrier["networks"]] == ["study"]
        assert "ports" not in carrier
        kind = "server" if name == "hub" else "client"
        seen = [v.split(":")[0].removeprefix(f"./kits/{name}/startup/") for v in carrier["volumes"]]
        assert seen == [name, "rootCA.pem", f"{kind}.crt", f"{kind}.key"]
        for each in (service, carrier):
            assert each["read_only"] is True
            assert each["cap_drop"] == ["ALL"]
            assert each["security_opt"] == ["no-new-privileges:true"]
            assert each["ulimits"]["core"] == 0
    assert compose["networks"]["study"]["internal"] is True


def test_the_kits_that_compose_asks_for_can_be_made(tmp_path):
    """A host that is an address, because services without a network look no name up."""
    study = Study(
        "s", "bin-values", {"hub": "coordinator", "basel": "site"}, network={"host": "172.30.0.2", "port": 8002}
    )
    kits = provision(study, tmp_path / "kits")
    for file in kits["basel"].glob("startup/*"):
        file.chmod(0o640)  # for the carrier's group
    kit = Kit.open(kits["basel"])
    text = kit.policy_file.read_text()
    assert 'sandbox = "full"' in text
    kit.policy_file.write_text(text.replace('sandbox = "full"', 'sandbox = "systemd"'))
    assert kit.policy().sandbox == "systemd"


# ---- Helm ------------------------------------------------------------------------------------------------------------


def render(**changes):
    """The chart's templates, by the little of Helm's language that they use; anything else fails."""
    values = yaml.safe_load((CHART / "values.yaml").read_text()) | changes

    def value(path):
        found = values
        for key in path.split(".")[2:]:
            found = found[key]
        return found

    def put(match):
        path, _, pipe = (x.strip() for x in match[1].partition("|"))
        assert re.fullmatch(r"\.Values(\.\w+)+", path), path
        assert pipe in ("", "toJson"), pipe
        return json.dumps(value(path)) if pipe else str(value(path))

    documents = []
    for file in sorted((CHART / "templates").glob("*.yaml")):
        lines, keep = [], [True]
        for line in file.read_text().splitlines():
            if found := re.fullmatch(r'\{\{- if eq (\S+) "(\w+)" \}\}', line):
                keep.append(value(found[1]) == found[2])
            elif line == "{{- else }}":
                keep[-1] = not keep[-1]
            elif line == "{{- end }}":
                keep.pop()
            elif all(keep):
                lines.append(re.sub(r"\{\{ (.*?) \}\}", put, line))
        assert keep == [True]
        documents += yaml.safe_load_all("\n".join(lines))
    return {d["kind"]: d for d in documents}


def test_a_site_reaches_one_address_and_nobody_reaches_it():
    policy = render()["NetworkPolicy"]["spec"]
    assert policy["ingress"] == []
    first, names = policy["egress"]
    assert first == {"to": [{"ipBlock": {"cidr": "192.0.2.17/32"}}], "ports": [{"protocol": "TCP", "port": 8002}]}
    assert {p["port"] for p in names["ports"]} == {53}
    assert "Service" not in render()


def test_a_coordinator_connects_nowhere_and_is_reached_by_its_peers():
    peers = [{"ipBlock": {"cidr": "198.51.100.0/24"}}]
    made = render(role="coordinator", network={"cidr": "", "port": 443, "allowFrom": peers})
    policy = made["NetworkPolicy"]["spec"]
    assert policy["egress"] == []
    assert policy["ingress"] == [{"from": peers, "ports": [{"protocol": "TCP", "port": 443}]}]
    assert made["Service"]["spec"]["ports"][0]["port"] == 443
    assert policy["podSelector"]["matchLabels"] == made["Service"]["spec"]["selector"]


def test_the_carriers_container_has_no_kit_and_neither_has_rights():
    pod = render()["StatefulSet"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    assert pod["securityContext"]["runAsNonRoot"] is True
    service, carrier = pod["containers"]
    assert {m["name"] for m in service["volumeMounts"]} == {"kit", "meet", "tmp"}
    assert {m["name"] for m in carrier["volumeMounts"]} == {"meet", "tls"}
    users = [c["securityContext"]["runAsUser"] for c in (service, carrier)]
    assert users == [61201, 61202]
    for each in (*pod["initContainers"], service, carrier):
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["readOnlyRootFilesystem"] is True
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_the_recipe_for_apptainer_has_its_sections():
    text = (DEPLOY / "apptainer" / "cloister.def").read_text()
    assert re.findall(r"^%(\w+)$", text, re.MULTILINE) == ["files", "post", "environment", "runscript", "test"]
