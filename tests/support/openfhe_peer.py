"""Three parties' threshold CKKS in OpenFHE: run by `test_oracle_openfhe` in an interpreter that has it.

python openfhe_peer.py in.json out.json      {"x", "m", "steps"} → {"product", "turned", "of_two"}
"""

import json
import sys

import openfhe as fhe


def main(source, target):
    with open(source) as f:
        asked = json.load(f)
    p = fhe.CCParamsCKKSRNS()
    p.SetMultiplicativeDepth(2)
    p.SetScalingModSize(50)
    p.SetBatchSize(len(asked["x"]))
    cc = fhe.GenCryptoContext(p)
    for feature in ("PKE", "KEYSWITCH", "LEVELEDSHE", "ADVANCEDSHE", "MULTIPARTY"):
        cc.Enable(getattr(fhe.PKESchemeFeature, feature))
    pairs = [cc.KeyGen()]
    for _ in range(2):
        pairs.append(cc.MultipartyKeyGen(pairs[-1].publicKey))
    joint, secrets = pairs[-1].publicKey, [k.secretKey for k in pairs]
    tag = joint.GetKeyTag()

    first = cc.KeySwitchGen(secrets[0], secrets[0])
    total = first
    for s in secrets[1:]:
        total = cc.MultiAddEvalKeys(total, cc.MultiKeySwitchGen(s, s, first), tag)
    shares = [cc.MultiMultEvalKey(s, total, tag) for s in secrets]
    relin = shares[0]
    for share in shares[1:]:
        relin = cc.MultiAddEvalMultKeys(relin, share, tag)
    cc.InsertEvalMultKey([relin])

    cc.EvalAtIndexKeyGen(secrets[0], [asked["steps"]])
    mine = cc.GetEvalAutomorphismKeyMap(secrets[0].GetKeyTag())
    turning = mine
    for s in secrets[1:]:
        turning = cc.MultiAddEvalAutomorphismKeys(
            turning, cc.MultiEvalAtIndexKeyGen(s, mine, [asked["steps"]], tag), tag
        )
    fhe.CryptoContext.InsertEvalAutomorphismKey(turning, tag)

    x, m = (cc.Encrypt(joint, cc.MakeCKKSPackedPlaintext(asked[k])) for k in ("x", "m"))
    product = cc.EvalMult(x, m)
    turned = cc.EvalRotate(product, asked["steps"])

    def opened(ct, holders):
        parts = [cc.MultipartyDecryptLead([ct], holders[0])[0]]
        parts += [cc.MultipartyDecryptMain([ct], s)[0] for s in holders[1:]]
        plain = cc.MultipartyDecryptFusion(parts)
        plain.SetLength(len(asked["x"]))
        return [float(v) for v in plain.GetRealPackedValue()]

    found = {"product": opened(product, secrets), "turned": opened(turned, secrets)}
    try:
        found["of_two"] = opened(product, secrets[:2])
    except RuntimeError:  # OpenFHE notices that the result is noise
        found["of_two"] = None
    with open(target, "w") as f:
        json.dump(found, f)


if __name__ == "__main__":
    main(*sys.argv[1:])
