//! Compare test vectors with a planner that was written from docs/spec.md alone. See vectors/README.md.
//! Usage: kvspec-vectors FILE.json ...   Exit status 0: all agree. 1: a vector differs. 2: another version.
use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};
const FAMILIES: [&str; 9] = ["tp", "replicas", "shardings", "pp", "cp", "blocks", "layouts", "prefixes", "windows"];
type Range = (i64, i64);
/// Producer, consumer, layer, part, units, producer units, consumer units, stripe.
type Slice<'a> = (usize, usize, &'a str, &'a str, Range, Range, Range, Range);
/// One byte: producer, consumer, producer memory and offset, consumer memory and offset.
type Byte = (usize, usize, i64, i64, i64, i64);
fn int(value: &Value) -> i64 { value.as_i64().expect("an integer") }
fn text(value: &Value) -> &str { value.as_str().expect("a text") }
fn list(value: &Value) -> &[Value] { value.as_array().map_or(&[], |items| items) }
fn range(value: &Value) -> Range { (int(&value[0]), int(&value[1])) }
fn sorted<T: Ord>(mut items: Vec<T>) -> Vec<T> { items.sort(); items }
fn shared(a: Range, b: Range) -> Range { (a.0.max(b.0), a.1.min(b.1)) }

/// Rule 2: the context rank, the number of context ranks, and the tokens of one turn.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Context(i64, i64, i64);
impl Context {
    fn owns(&self, p: i64) -> bool { p / self.2 % self.1 == self.0 }
    fn local(&self, p: i64) -> i64 { p / self.turn() * self.2 + (p % self.turn() - self.0 * self.2).clamp(0, self.2) }
    fn meets(&self, other: &Context) -> bool { (0..self.turn() * other.turn()).any(|p| self.owns(p) && other.owns(p)) }
    fn turn(&self) -> i64 { self.1 * self.2 }
}

/// One part of one layer on one rank.
struct Held<'a> {
    rank: usize, stage: i64, layer: &'a str, name: &'a str, units: Range, context: Context,
    group: &'a Value, kind: &'a Value, part: &'a Value, region: &'a Value,
}
/// Rule 1: the units of a part that a TP rank owns.
fn units(engine: &Value, part: &Value, tp: i64) -> Range {
    let [size, grain] = [int(&engine["tp_size"]), int(&part["granularity"])];
    let packs = int(&part["units"]) / grain;
    let (start, stop) = (tp * packs / size, (tp + 1) * packs / size);
    let even = (start * grain, grain * if packs >= size { stop } else { start + 1 });
    part.get("ranges").map_or(even, |ranges| range(&ranges[tp as usize]))
}

/// Rule 2: the positions that a rank owns.
fn context(engine: &Value, group: &Value, pcp: i64, tp: i64) -> Context {
    let dcp = int(&engine["dcp_size"]);
    let (mut own, mut size) = (pcp * dcp + tp % dcp, int(&engine["pcp_size"]) * dcp);
    if let Some(rows) = engine.get("context_ranks") {
        own = int(&rows[pcp as usize][tp as usize]);
        size = 1 + list(rows).iter().flat_map(|row| list(row).iter().map(int)).max().unwrap();
    }
    let sharded = size > 1 && group["context_sharded"] != false;
    if sharded { Context(own, size, int(&engine["interleave_size"])) } else { Context(0, 1, 1) }
}

/// Everything that the ranks of an engine hold. A rank has a region for each part that it holds.
fn held<'a>(engine: &'a Value) -> Vec<Held<'a>> {
    let of_group = |group: &'a Value| list(&group["kinds"]).iter().map(move |kind| (group, kind));
    let kinds: Vec<_> = list(&engine["groups"]).iter().flat_map(of_group).collect();
    let mut all = vec![];
    for (rank, json) in list(&engine["ranks"]).iter().enumerate() {
        let (stage, pcp, tp) = (int(&json["pp"]), int(&json["pcp"]), int(&json["tp"]));
        for region in list(&json["regions"]) {
            let (layer, name) = (text(&region["layer"]), text(&region["part"]));
            let &(group, kind) = kinds.iter().find(|(_, k)| list(&k["layers"]).iter().any(|l| l == layer)).unwrap();
            let part = list(&kind["parts"]).iter().find(|part| part["name"] == name).unwrap();
            let (units, context) = (units(engine, part, tp), context(engine, group, pcp, tp));
            all.push(Held { rank, stage, layer, name, units, context, group, kind, part, region });
        }
    }
    all
}
impl Held<'_> {
    /// Rule 3: the memory and the offset of place `unit` of the units, in the row of position `p`.
    fn place(&self, tables: &Value, p: i64, unit: i64) -> (i64, i64) {
        let (block, kernel) = (int(&self.group["block_size"]), int(&self.group["memory_block_size"]));
        let table = &tables[text(&self.group["name"])];
        let n = self.context.local(p) - int(&table["first_token"]) / self.context.1;
        let state = n % kernel / int(&self.part["tokens_per_state"]);
        let stored = int(&table["ids"][(n / block) as usize]) * (block / kernel) + n % block / kernel;
        let strides = [(stored, "block_stride"), (unit, "unit_stride"), (state, "state_stride")];
        let offset: i64 = strides.iter().map(|(index, name)| index * int(&self.region[*name])).sum();
        (int(&self.region["memory"]), int(&self.region["base"]) + offset)
    }
    /// Rule 4: the first positions of the rows that the rank owns and that must move.
    fn rows(&self, request: &Value) -> impl Iterator<Item = i64> + '_ {
        let (n, live, row) = (int(&request["num_tokens"]), &self.kind["live"], int(&self.part["tokens_per_state"]));
        let size = live.get("size").map_or(1, int);
        let first = match text(&live["rule"]) { "window" => n - size + 1, "chunk" => n / size * size, _ => 0 };
        let start = first.max(int(&request["cached"][text(&self.group["name"])]));
        (start / row * row..if start < n { n } else { 0 }).step_by(row as usize).filter(|p| self.context.owns(*p))
    }
}

/// Rule 5: the replicas among which a reader chooses.
fn candidates(policy: &Value, reader: usize, replicas: &[usize]) -> Vec<usize> {
    let near = |p: &usize| policy["producer_nodes"][*p] == policy["consumer_nodes"][reader];
    match text(&policy["name"]) {
        "first" => vec![replicas[0]],
        "nearest" if replicas.iter().any(near) => replicas.iter().copied().filter(near).collect(),
        _ => replicas.to_vec(),
    }
}

/// Rules 5 and 6: the slices of all ranks.
fn plan<'a>(from: &[Held<'a>], to: &[Held<'a>], policy: &Value) -> BTreeSet<Slice<'a>> {
    let mut slices = BTreeSet::new();
    // Layers of one set have equal parts, one group on each side and one stage of the producer.
    let sets: BTreeMap<&str, _> = from.iter().map(|h| (h.layer, (h.stage, h.group as *const Value))).collect();
    for own in to {
        let mut classes: BTreeMap<(Context, Range), Vec<usize>> = BTreeMap::new();
        for h in from.iter().filter(|h| h.layer == own.layer && h.name == own.name) {
            classes.entry((h.context, h.units)).or_default().push(h.rank);
        }
        let reads = |h: &Held, context: &Context, units: Range| {
            let (same, both) = (std::ptr::eq(h.part, own.part), shared(h.units, units));
            same && sets[h.layer] == sets[own.layer] && both.0 < both.1 && context.meets(&h.context)
        };
        for ((context, units), replicas) in classes.iter().filter(|((c, u), _)| reads(own, c, *u)) {
            let among = candidates(policy, own.rank, replicas);
            let readers: BTreeSet<usize> = to.iter().filter(|h| reads(h, context, *units)).map(|h| h.rank).collect();
            let equal: Vec<usize> = readers.into_iter().filter(|r| candidates(policy, *r, replicas) == among).collect();
            let (m, k, salt) = (among.len() as i64, equal.len() as i64, int(&policy["salt"]));
            let i = equal.iter().position(|reader| *reader == own.rank).unwrap() as i64;
            let striped = policy["name"] == "stripe";
            let blocks = if striped { (1..=m).find(|b| b * k % m == 0).unwrap() } else { 1 };
            let both = shared(own.units, *units);
            let [from_units, to_units] = [units.0, own.units.0].map(|start| (both.0 - start, both.1 - start));
            for b in 0..blocks {
                let p = among[((if striped { b * k + i } else { i * m / k } + salt) % m) as usize];
                slices.insert((p, own.rank, own.layer, own.name, both, from_units, to_units, (b, blocks)));
            }
        }
    }
    slices
}

/// Rule 6: the bytes that slices move.
fn copies(from: &[Held], to: &[Held], request: &Value, slices: &BTreeSet<Slice>) -> Vec<Byte> {
    let mut bytes = vec![];
    for &(p, c, layer, name, units, from_units, to_units, (first, step)) in slices {
        let a = from.iter().find(|h| (h.rank, h.layer, h.name) == (p, layer, name)).unwrap();
        let b = to.iter().find(|h| (h.rank, h.layer, h.name) == (c, layer, name)).unwrap();
        let virtual_block = int(&b.group["block_size"]) * b.context.1;
        for t in b.rows(request).filter(|t| a.context.owns(*t) && t / virtual_block % step == first) {
            for u in 0..units.1 - units.0 {
                let (m, x) = a.place(&request["producer_blocks"], t, from_units.0 + u);
                let (n, y) = b.place(&request["consumer_blocks"], t, to_units.0 + u);
                bytes.extend((0..int(&b.part["content_bytes"])).map(|i| (p, c, m, x + i, n, y + i)));
            }
        }
    }
    sorted(bytes)
}

/// Rule 6, cover: each wanted byte of each consumer rank is written once, and no other byte.
fn covers(to: &[Held], request: &Value, moved: &[Byte]) -> bool {
    let mut wanted = vec![];
    for (own, t) in to.iter().flat_map(|own| own.rows(request).map(move |t| (own, t))) {
        for u in 0..own.units.1 - own.units.0 {
            let (m, offset) = own.place(&request["consumer_blocks"], t, u);
            wanted.extend((0..int(&own.part["content_bytes"])).map(|i| (own.rank, m, offset + i)));
        }
    }
    sorted(moved.iter().map(|byte| (byte.1, byte.4, byte.5)).collect()) == sorted(wanted)
}
fn judge(vector: &Value) -> [bool; 3] {
    let (from, to, request) = (held(&vector["producer"]), held(&vector["consumer"]), &vector["request"]);
    let (mut slices, mut moved) = (BTreeSet::new(), vec![]);
    let rank = |value: &Value| int(value) as usize;
    for s in list(&vector["expected"]["slices"]) {
        let [units, a, b, stripe] = ["units", "producer_units", "consumer_units", "stripe"].map(|name| range(&s[name]));
        let (p, c, layers) = (rank(&s["producer"]), rank(&s["consumer"]), list(&s["layers"]).iter());
        for (layer, part) in layers.flat_map(|layer| list(&s["parts"]).iter().map(move |part| (layer, part))) {
            slices.insert((p, c, text(layer), text(part), units, a, b, stripe));
        }
    }
    for pair in list(&vector["expected"]["copies"]) {
        let (p, c) = (rank(&pair["producer"]), rank(&pair["consumer"]));
        for copy in list(&pair["copies"]) {
            let [m, a, n, b, length] = [0, 1, 2, 3, 4].map(|i| int(&copy[i]));
            moved.extend((0..length).map(|i| (p, c, m, a + i, n, b + i)));
        }
    }
    let (moved, planned) = (sorted(moved), plan(&from, &to, &vector["policy"]));
    [planned == slices, copies(&from, &to, request, &slices) == moved, covers(&to, request, &moved)]
}
fn main() {
    let mut right = true;
    for path in std::env::args().skip(1) {
        let file: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        if file["format"] != "kvspec-vectors" || file["version"] != 1 { std::process::exit(2) }
        let (family, vectors) = (text(&file["family"]), list(&file["vectors"]));
        let known = FAMILIES.contains(&family);
        let results: Vec<[bool; 3]> = vectors.iter().filter(|_| known).map(judge).collect();
        let [s, c, v] = [0, 1, 2].map(|i| results.iter().filter(|result| result[i]).count());
        let agree = format!("slices of {s}, copies of {c} and cover of {v} agree");
        println!("{family:10} {:4} vectors: {}", vectors.len(), if known { &agree } else { "skipped" });
        right &= !known || s.min(c).min(v) == vectors.len();
    }
    std::process::exit(i32::from(!right));
}
