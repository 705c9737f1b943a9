#!/usr/bin/env node
// Independent verifier of Cloister receipts, format 3. It shares no code with Cloister and needs Node 20 only.
//
//   node receipt.mjs FILE...              verify each file; exit code 0 if all are valid, 1 if not, 2 on wrong usage
//   node receipt.mjs --key HEX FILE...    also require that the receipt is signed with this Ed25519 public key
//
// docs/security/receipts.md describes the format. tests/vectors/receipts holds valid and invalid receipts.

import { createHash, createPublicKey, verify as verifySignature } from "node:crypto";
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const FORMAT = "cloister-receipt/3";
const TOP = ["header", "head", "status", "public", "signature", "entries"];
const ENTRY = ["kind", "protocol", "line", "name", "to", "bytes", "sha256", "scope", "hash"];
const DOMAIN = "cloister/1/"; // what every signature of a Cloister identity starts with
const ED25519_SPKI = Buffer.from("302a300506032b6570032100", "hex"); // DER header of a raw public key
const MAX_DEPTH = 64;

class Invalid extends Error {}

function require_(condition, reason) {
  if (!condition) throw new Invalid(reason);
}

// ---- JSON, strictly -------------------------------------------------------------------------------------------------
// JSON.parse takes the last of two equal keys and rounds large integers. Both would let two readers see two receipts.

class Whole {
  // an integer as it was written, so that 100 and 100.0 stay different where only integers are allowed
  constructor(value) {
    this.value = value;
  }
}

function parse(text) {
  let at = 0;
  const space = () => {
    while (" \t\n\r".includes(text[at]) && at < text.length) at++;
  };
  const expect = (word) => {
    require_(text.startsWith(word, at), `not JSON: expected ${word} at ${at}`);
    at += word.length;
  };
  const string = () => {
    const match = /"(?:[^"\\\u0000-\u001f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*"/y;
    match.lastIndex = at;
    const found = match.exec(text);
    require_(found, `not JSON: expected a string at ${at}`);
    at += found[0].length;
    const value = JSON.parse(found[0]);
    require_(value.isWellFormed(), "a text with half a surrogate pair");
    return value;
  };
  const number = () => {
    const match = /-?(?:0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?/y;
    match.lastIndex = at;
    const found = match.exec(text);
    require_(found, `not JSON: unexpected character at ${at}`);
    at += found[0].length;
    const value = Number(found[0]);
    require_(Number.isFinite(value), "a number that is too large");
    if (found[1] !== undefined || found[2] !== undefined) return value;
    require_(Number.isSafeInteger(value), "an integer beyond 2^53 - 1");
    return new Whole(value);
  };
  const items = (open, close, read) => {
    expect(open);
    space();
    if (text[at] === close) return void at++;
    for (;;) {
      space();
      read();
      space();
      if (text[at] === close) return void at++;
      expect(",");
    }
  };
  const value = (depth) => {
    require_(depth <= MAX_DEPTH, `more than ${MAX_DEPTH} levels`);
    space();
    const first = text[at];
    if (first === "{") {
      const found = new Map();
      items("{", "}", () => {
        const key = string();
        require_(!found.has(key), `the key ${JSON.stringify(key)} is repeated`);
        space();
        expect(":");
        found.set(key, value(depth + 1));
      });
      return found;
    }
    if (first === "[") {
      const found = [];
      items("[", "]", () => found.push(value(depth + 1)));
      return found;
    }
    if (first === '"') return string();
    for (const [word, meaning] of [["true", true], ["false", false], ["null", null]]) {
      if (text.startsWith(word, at)) {
        at += word.length;
        return meaning;
      }
    }
    return number();
  };
  const found = value(0);
  space();
  require_(at === text.length, "text behind the end of the receipt");
  return found;
}

// RFC 8785: keys sorted by UTF-16 code units, strings and numbers as ECMAScript writes them, no white space.
function canonical(x) {
  if (x instanceof Whole) return JSON.stringify(x.value);
  if (x instanceof Map) {
    const keys = [...x.keys()].sort(); // sort() compares UTF-16 code units
    return `{${keys.map((key) => `${JSON.stringify(key)}:${canonical(x.get(key))}`).join(",")}}`;
  }
  if (Array.isArray(x)) return `[${x.map(canonical).join(",")}]`;
  return JSON.stringify(x);
}

// ---- the receipt ----------------------------------------------------------------------------------------------------

const sha256 = (...parts) => {
  const hash = createHash("sha256");
  for (const part of parts) hash.update(part);
  return hash.digest("hex");
};

function checkFields(map, wanted, what) {
  require_(map instanceof Map, `${what} is not an object`);
  for (const key of wanted) require_(map.has(key), `${what}: the field ${key} is missing`);
  require_(map.size === wanted.length, `${what} has a field that no receipt has`);
}

function hexBytes(text, length, what) {
  require_(typeof text === "string" && /^[0-9a-f]*$/.test(text) && text.length === 2 * length, `${what} is damaged`);
  return Buffer.from(text, "hex");
}

function lengthPrefixed(...parts) {
  const prefixed = parts.flatMap((part) => {
    const size = Buffer.alloc(8);
    size.writeBigUInt64BE(BigInt(part.length));
    return [size, part];
  });
  return Buffer.concat(prefixed);
}

/** Throw `Invalid` unless the text is a complete, unaltered and signed receipt; returns what it says. */
export function verifyReceipt(text, key = null) {
  const receipt = parse(text);
  checkFields(receipt, TOP, "the receipt");
  const header = receipt.get("header");
  require_(header instanceof Map, "the header is not an object");
  require_(header.get("format") === FORMAT, `the format is not ${FORMAT}`);
  const entries = receipt.get("entries");
  require_(Array.isArray(entries) && entries.length > 0, "there are no entries: the run has not ended");

  let head = sha256(canonical(header));
  entries.forEach((entry, i) => {
    checkFields(entry, ENTRY, `entry ${i}`);
    const hash = entry.get("hash");
    for (const field of ENTRY.filter((name) => name !== "bytes")) {
      require_(typeof entry.get(field) === "string", `entry ${i}: ${field} is not text`);
    }
    const size = entry.get("bytes");
    require_(size instanceof Whole && size.value >= 0, `entry ${i}: bytes is not a whole number from 0`);
    const row = new Map(entry);
    row.delete("hash");
    head = sha256(Buffer.from(head, "hex"), canonical(row));
    require_(hash === head, `entry ${i} was altered, or one before it was added or removed`);
  });
  require_(receipt.get("head") === head, "the last hash does not belong to these entries");
  const last = entries.at(-1);
  require_(last.get("kind") === "result", "the run has not ended");
  require_(receipt.get("status") === last.get("name"), "the outcome is not the one the chain ends with");

  const publicKey = hexBytes(receipt.get("public"), 32, "the public key");
  const signature = hexBytes(receipt.get("signature"), 64, "the signature");
  require_(key === null || key === receipt.get("public"), "the receipt is signed with another key");
  const signed = lengthPrefixed(
    Buffer.from(`${DOMAIN}sign`), Buffer.from("receipt"), Buffer.from(head, "hex"),
  );
  const der = Buffer.concat([ED25519_SPKI, publicKey]);
  let good = false;
  try {
    good = verifySignature(null, signed, createPublicKey({ key: der, format: "der", type: "spki" }), signature);
  } catch {
    good = false; // not a point of the curve
  }
  require_(good, "the signature does not fit the key and the entries");
  return { party: header.get("party"), status: last.get("name"), entries: entries.length };
}

function main(words) {
  let key = null;
  if (words[0] === "--key") {
    key = words[1]?.toLowerCase();
    words = words.slice(2);
    if (!/^[0-9a-f]{64}$/.test(key ?? "")) words = [];
  }
  if (words.length === 0) {
    console.error("usage: node receipt.mjs [--key PUBLIC_KEY_IN_HEX] FILE...");
    return 2;
  }
  let code = 0;
  for (const file of words) {
    try {
      const text = new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(readFileSync(file));
      const found = verifyReceipt(text, key);
      console.log(`${file}: VALID, ${found.entries} entries, signed by ${found.party}, ${found.status}`);
    } catch (error) {
      code = 1;
      console.log(`${file}: INVALID, ${error instanceof Invalid ? error.message : error.message.split("\n")[0]}`);
    }
  }
  return code;
}

if (process.argv[1] && import.meta.url === pathToFileURL(process.argv[1]).href) {
  process.exitCode = main(process.argv.slice(2));
}
