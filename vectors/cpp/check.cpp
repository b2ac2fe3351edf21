// Compare test vectors with a planner that was written from docs/spec.md alone. See vectors/README.md.
// Usage: check FILE.json ...   Exit status 0: all agree. 1: a vector differs.
#include <algorithm>
#include <array>
#include <cstdio>
#include <fstream>
#include <map>
#include <numeric>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <tuple>
#include <vector>

using std::map, std::pair, std::set, std::string, std::tuple, std::vector;
using Json = nlohmann::json;
using Int = long long;
using Range = pair<Int, Int>;  // Start and stop.
// Producer, consumer, layer, part, units, producer units, consumer units, stripe.
using Slice = tuple<Int, Int, string, string, Range, Range, Range, Range>;
using Copy = std::array<Int, 5>;               // As in the vectors.
using Copies = map<Range, vector<Copy>>;       // By producer and consumer.

const set<string> FAMILIES = {"tp", "replicas", "shardings", "pp", "cp", "blocks", "layouts", "prefixes", "windows"};

struct Context {  // Rule 2.
  Int rank = 0, size = 1, run = 1;
  bool owns(Int p) const { return p / run % size == rank; }
  Int local(Int p) const {
    return p / (run * size) * run + std::clamp(p % (run * size) - rank * run, Int(0), run);
  }
  auto operator<=>(const Context&) const = default;
  bool meets(const Context& other) const {
    for (Int p = 0; p < std::lcm(size * run, other.size * other.run); p++)
      if (owns(p) && other.owns(p)) return true;
    return false;
  }
};

struct Engine {
  const Json& json;
  map<string, const Json*> group, kind;  // By layer.
  map<string, Int> stage;                // By layer.
  explicit Engine(const Json& engine) : json(engine) {
    map<Int, vector<string>> by_number;  // Rule 1: stages.
    for (auto& g : json["groups"])
      for (auto& k : g["kinds"])
        for (string layer : k["layers"]) {
          group[layer] = &g, kind[layer] = &k;
          by_number[std::stoll("0" + layer.substr(std::min(layer.find_first_of("0123456789"), layer.size())))]
              .push_back(layer);
        }
    Int place = 0, count = by_number.size(), size = json.value("pp_size", 1);
    for (auto& [number, layers] : by_number) {
      for (Int s = 0; s < size; s++)
        if (s * count / size <= place && place < (s + 1) * count / size)
          for (auto& layer : layers) stage[layer] = s;
      place++;
    }
    for (size_t s = 0; json.contains("stages") && s < json["stages"].size(); s++)
      for (string layer : json["stages"][s]) stage[layer] = s;
  }
  Int size() const { return json["ranks"].size(); }
  const Json& rank(Int index) const { return json["ranks"][index]; }
  Range units(const Json& part, Int index) const {  // Rule 1: shards.
    Int tp = rank(index)["tp"], size = json.value("tp_size", 1), grain = part.value("granularity", 1);
    if (part.contains("ranges")) return part["ranges"][tp];
    Int packs = Int(part["units"]) / grain, start = tp * packs / size;
    return {start * grain, (packs >= size ? (tp + 1) * packs / size : start + 1) * grain};
  }
  Context context(const Json& of, Int index) const {  // Rule 2.
    Int pcp = rank(index)["pcp"], tp = rank(index)["tp"], dcp = json.value("dcp_size", 1);
    Int own = pcp * dcp + tp % dcp, size = json.value("pcp_size", 1) * dcp;
    if (json.contains("context_ranks")) {
      own = json["context_ranks"][pcp][tp], size = 0;
      for (auto& row : json["context_ranks"])
        for (Int number : row) size = std::max(size, number + 1);
    }
    if (size == 1 || !of.value("context_sharded", true)) return {};
    return {own, size, json.value("interleave_size", 1)};
  }
  const Json& region(Int index, const string& layer, const string& part) const {
    for (auto& r : rank(index)["regions"])
      if (r["layer"] == layer && r["part"] == part) return r;
    throw std::runtime_error("no region " + layer + "." + part);
  }
  // The memory and the offset of unit 0 of the row of position p. Rule 3.
  Range place(Int index, const Json& table, const Json& region, const string& layer, const Json& part, Int p) const {
    const Json& g = *group.at(layer);
    Context own = context(g, index);
    Int size = g["block_size"], kernel = g.value("memory_block_size", size);
    Int n = own.local(p) - table.value("first_token", 0) / own.size;
    Int block = Int(table["ids"].at(n / size)) * (size / kernel) + n % size / kernel;
    Int state = n % kernel / Int(part["tokens_per_state"]);
    return {region.value("memory", 0),
            Int(region["base"]) + block * Int(region["block_stride"]) + state * Int(region["state_stride"])};
  }
};

Range minus(Range units, Int first) { return {units.first - first, units.second - first}; }

// Rule 5: the candidates of reader i, at places of the index order.
vector<Int> candidates(const Json& policy, Int reader, const vector<Int>& replicas) {
  if (policy.value("name", "spread") == "first") return {replicas[0]};
  vector<Int> near;
  if (policy.value("name", "spread") == "nearest")
    for (Int r : replicas)
      if (policy["producer_nodes"][r] == policy["consumer_nodes"][reader]) near.push_back(r);
  return near.empty() ? replicas : near;
}

// Rules 5 and 6: the slices of one part of layers with one producer stage.
void plan_part(const Engine& from, const Engine& to, const Json& policy, const vector<string>& layers,
               const Json& source, const Json& target, set<Slice>& slices) {
  const Json &h = *from.group.at(layers[0]), &g = *to.group.at(layers[0]);
  map<Context, map<Range, vector<Int>>> classes;
  for (Int p = 0; p < from.size(); p++)
    if (Range own = from.units(source, p); from.rank(p)["pp"] == from.stage.at(layers[0]) && own.first < own.second)
      classes[from.context(h, p)][own].push_back(p);
  for (auto& [context, by_units] : classes)
    for (auto& [units, replicas] : by_units) {
      map<Int, Range> readers;
      for (Int c = 0; c < to.size(); c++) {
        Range own = to.units(target, c), both = {std::max(own.first, units.first), std::min(own.second, units.second)};
        bool here = false;
        for (auto& layer : layers) here |= to.stage.at(layer) == to.rank(c)["pp"];
        if (here && both.first < both.second && context.meets(to.context(g, c))) readers[c] = both;
      }
      for (auto& [c, shared] : readers) {
        auto among = candidates(policy, c, replicas);
        Int M = among.size(), K = 0, i = 0, salt = policy.value("salt", 0);
        for (auto& [other, _] : readers)
          if (candidates(policy, other, replicas) == among) i += other < c, K++;
        bool striped = policy.value("name", "spread") == "stripe" && M > 1;
        Int blocks = striped ? M / std::gcd(K, M) : 1;
        for (Int b = 0; b < blocks; b++)
          for (auto& layer : layers)
            if (Int p = among[((striped ? b * K + i : i * M / K) + salt) % M]; to.stage.at(layer) == to.rank(c)["pp"])
              slices.insert({p, c, layer, target["name"], shared, minus(shared, units.first),
                             minus(shared, to.units(target, c).first), {b, blocks}});
      }
    }
}

set<Slice> plan(const Engine& from, const Engine& to, const Json& policy) {
  set<Slice> slices;
  for (auto& g : to.json["groups"])
    for (auto& kind : g["kinds"]) {
      map<pair<const Json*, Int>, vector<string>> sets;
      for (string layer : kind["layers"]) sets[{from.group.at(layer), from.stage.at(layer)}].push_back(layer);
      for (auto& [_, layers] : sets)
        for (size_t i = 0; i < kind["parts"].size(); i++)
          plan_part(from, to, policy, layers, (*from.kind.at(layers[0]))["parts"][i], kind["parts"][i], slices);
    }
  return slices;
}

Range wanted(const Engine& to, const Json& request, const string& layer) {  // Rule 4.
  Int n = request["num_tokens"], cached = 0, start = 0;
  const Json& live = (*to.kind.at(layer))["live"];
  if (request.contains("cached")) cached = request["cached"].value(string((*to.group.at(layer))["name"]), 0);
  if (live["rule"] == "window") start = std::max(Int(0), n - Int(live["size"]) + 1);
  if (live["rule"] == "chunk") start = n / Int(live["size"]) * Int(live["size"]);
  return {std::max(start, cached), n};
}

const Json& part_of(const Engine& engine, const string& layer, const string& name) {
  for (auto& part : (*engine.kind.at(layer))["parts"])
    if (part["name"] == name) return part;
  throw std::runtime_error("no part " + name);
}

Copies copies(const Engine& from, const Engine& to, const Json& request, const set<Slice>& slices) {  // Rule 6.
  Copies found;
  for (auto& [p, c, layer, name, units, from_units, to_units, stripe] : slices) {
    const Json &h = *from.group.at(layer), &g = *to.group.at(layer), &part = part_of(to, layer, name);
    const Json &a = from.region(p, layer, name), &b = to.region(c, layer, name);
    Context left = from.context(h, p), right = to.context(g, c);
    auto [start, stop] = wanted(to, request, layer);
    Int row = part["tokens_per_state"], size = part["content_bytes"];
    for (Int t = start / row * row; t < stop; t += row) {
      bool moves = t / (Int(g["block_size"]) * right.size) % stripe.second == stripe.first;
      if (!moves || !left.owns(t) || !right.owns(t)) continue;
      auto [m, x] = from.place(p, request["producer_blocks"][string(h["name"])], a, layer, part, t);
      auto [n, y] = to.place(c, request["consumer_blocks"][string(g["name"])], b, layer, part, t);
      for (Int u = 0; u < units.second - units.first; u++)
        found[{p, c}].push_back({m, x + (from_units.first + u) * Int(a["unit_stride"]), n,
                                 y + (to_units.first + u) * Int(b["unit_stride"]), size});
    }
  }
  for (auto& [_, list] : found) {
    std::sort(list.begin(), list.end(), [](auto& a, auto& b) { return std::tie(a[2], a[3]) < std::tie(b[2], b[3]); });
    vector<Copy> joined;
    for (auto& c : list) {
      Copy* last = joined.empty() ? nullptr : &joined.back();
      bool joins = last && (*last)[0] == c[0] && (*last)[2] == c[2] && (*last)[1] + (*last)[4] == c[1] &&
                   (*last)[3] + (*last)[4] == c[3];
      if (joins) (*last)[4] += c[4];
      else joined.push_back(c);
    }
    list = joined;
  }
  return found;
}

// Cover: each wanted byte of each consumer rank is written once, and no other byte.
bool covers(const Engine& to, const Json& request, const Copies& copies) {
  map<tuple<Int, Int, Int>, Int> writes;  // By rank, memory and offset: writes less those wanted.
  for (auto& [pair, list] : copies)
    for (auto& copy : list)
      for (Int byte = 0; byte < copy[4]; byte++) writes[{pair.second, copy[2], copy[3] + byte}]++;
  for (Int c = 0; c < to.size(); c++)
    for (auto& region : to.rank(c)["regions"]) {
      string layer = region["layer"];
      const Json &g = *to.group.at(layer), &part = part_of(to, layer, region["part"]);
      auto [start, stop] = wanted(to, request, layer);
      for (Int row = part["tokens_per_state"], t = start / row * row; t < stop; t += row)
        if (to.context(g, c).owns(t)) {
          auto [m, x] = to.place(c, request["consumer_blocks"][string(g["name"])], region, layer, part, t);
          for (Int u = 0; u < Int(region["units"]); u++)
            for (Int byte = 0; byte < Int(part["content_bytes"]); byte++)
              writes[{c, m, x + u * Int(region["unit_stride"]) + byte}]--;
        }
    }
  return std::all_of(writes.begin(), writes.end(), [](auto& entry) { return entry.second == 0; });
}

int main(int count, char** names) {
  bool right = true;
  std::printf("%-10s %8s %8s %8s %8s\n", "family", "vectors", "slices", "copies", "cover");
  for (int i = 1; i < count; i++) {
    Json file = Json::parse(std::ifstream(names[i]));
    if (file["format"] != "kvspec-vectors" || file["version"] != 1) return std::fprintf(stderr, "%s: unknown version\n", names[i]), 2;
    int total = file["vectors"].size(), same[3] = {};
    string family = file["family"];
    if (!FAMILIES.count(family)) { std::printf("%-10s %8d  skipped\n", family.c_str(), total); continue; }
    for (auto& v : file["vectors"]) {
      Engine from(v["producer"]), to(v["consumer"]);
      const Json &request = v["request"], none = Json::array();
      set<Slice> expected;
      for (auto& s : v["expected"].value("slices", none))
        for (string layer : s["layers"])
          for (string part : s["parts"])
            expected.insert({s["producer"], s["consumer"], layer, part, s["units"], s["producer_units"],
                             s["consumer_units"], s.value("stripe", Range(0, 1))});
      Copies moved;
      for (auto& pair : v["expected"].value("copies", none)) moved[{pair["producer"], pair["consumer"]}] = pair["copies"];
      same[0] += plan(from, to, v.value("policy", Json::object())) == expected;
      same[1] += copies(from, to, request, expected) == moved;
      same[2] += covers(to, request, moved);
    }
    std::printf("%-10s %8d %8d %8d %8d\n", family.c_str(), total, same[0], same[1], same[2]);
    right &= same[0] == total && same[1] == total && same[2] == total;
  }
  return right ? 0 : 1;
}
