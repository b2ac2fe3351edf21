// Compare test vectors with a planner that was written from docs/spec.md alone. See vectors/README.md.
// Usage: check FILE.json ...   Exit status 0: all agree. 1: a vector differs. 2: another version.
#include <algorithm>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <numeric>
#include <set>
using std::map, std::pair, std::set, std::string, std::tuple, std::vector;
using Json = nlohmann::json;
using Int = long long;
using Range = pair<Int, Int>;
// Producer, consumer, layer, part, units, producer units, consumer units, stripe.
using Slice = tuple<Int, Int, string, string, Range, Range, Range, Range>;
// One byte: producer, consumer, producer memory and offset, consumer memory and offset.
using Bytes = vector<std::array<Int, 6>>;
auto sorted(auto list) { return std::sort(list.begin(), list.end()), list; }
const set<string> FAMILIES = {"tp", "replicas", "shardings", "pp", "cp", "blocks", "layouts", "prefixes", "windows"};

struct Context {  // Rule 2.
  Int rank = 0, size = 1, run = 1;
  auto operator<=>(const Context&) const = default;
  bool owns(Int p) const { return p / run % size == rank; }
  Int local(Int p) const { return p / (run * size) * run + std::clamp(p % (run * size) - rank * run, Int(0), run); }
  bool meets(const Context& other, Int p = 0) const {
    while (p < std::lcm(size * run, other.size * other.run) && !(owns(p) && other.owns(p))) p++;
    return owns(p) && other.owns(p);
  }
};

struct Engine {
  const Json& json;
  Int size;                                     // Number of ranks.
  map<string, const Json*> group, kind;         // By layer.
  map<pair<string, string>, const Json*> part;  // By layer and name.
  map<string, Int> stage;                       // By layer. Rule 1.
  explicit Engine(const Json& engine) : json(engine), size(engine["ranks"].size()) {
    set<Int> numbers;
    auto number = [](string name) { return std::stoll(name.substr(name.find_first_of("0123456789"))); };
    for (auto& g : json["groups"])
      for (auto& k : g["kinds"])
        for (string layer : k["layers"]) {
          group[layer] = &g, kind[layer] = &k, numbers.insert(number(layer));
          for (auto& p : k["parts"]) part[{layer, p["name"]}] = &p;
        }
    for (Int count = numbers.size(), stages = json["pp_size"]; auto& [layer, _] : group)
      for (Int s = 0; s < stages; s++)
        if (s * count / stages <= std::distance(numbers.begin(), numbers.find(number(layer)))) stage[layer] = s;
    for (Int s = 0; json.contains("stages") && s < Int(json["pp_size"]); s++)
      for (string layer : json["stages"][s]) stage[layer] = s;
  }
  const Json& rank(Int index) const { return json["ranks"][index]; }
  const Json& region(Int index, const string& layer, const string& name) const {
    auto& all = rank(index)["regions"];
    return *std::find_if(all.begin(), all.end(), [&](auto& r) { return r["layer"] == layer && r["part"] == name; });
  }
  Range units(const Json& part, Int index) const {  // Rule 1.
    Int tp = rank(index)["tp"], ranks = json["tp_size"], grain = part["granularity"];
    if (part.contains("ranges")) return part["ranges"][tp];
    Int packs = Int(part["units"]) / grain, start = tp * packs / ranks;
    return {start * grain, (packs >= ranks ? (tp + 1) * packs / ranks : start + 1) * grain};
  }
  Context context(const string& layer, Int index) const {  // Rule 2.
    Int pcp = rank(index)["pcp"], tp = rank(index)["tp"], dcp = json["dcp_size"];
    Int own = pcp * dcp + tp % dcp, ranks = Int(json["pcp_size"]) * dcp;
    if (json.contains("context_ranks")) own = json["context_ranks"][pcp][tp], ranks = 0;
    for (vector<Int> row : json.value("context_ranks", Json::array()))
      for (Int number : row) ranks = std::max(ranks, number + 1);
    if (ranks == 1 || !group.at(layer)->value("context_sharded", true)) return {};
    return {own, ranks, json["interleave_size"]};
  }
  // The memory and the offset of place u of the units, in the row of position p. Rule 3.
  Range place(Int index, const Json& tables, const Json& r, Int p, Int u) const {
    const Json &g = *group.at(r["layer"]), &table = tables[string(g["name"])], &of = *part.at({r["layer"], r["part"]});
    Int block = g["block_size"], kernel = g["memory_block_size"], row = of["tokens_per_state"];
    Context own = context(r["layer"], index);
    Int n = own.local(p) - Int(table["first_token"]) / own.size;
    Int in_memory = Int(table["ids"].at(n / block)) * (block / kernel) + n % block / kernel;
    return {r["memory"], Int(r["base"]) + in_memory * Int(r["block_stride"]) + u * Int(r["unit_stride"]) +
                             n % kernel / row * Int(r["state_stride"])};
  }
  vector<Int> rows(const Json& request, const string& layer, const Json& part) const {  // Rule 4.
    const Json& live = kind.at(layer)->at("live");
    Int n = request["num_tokens"], start = request["cached"][string(group.at(layer)->at("name"))];
    if (live["rule"] == "window") start = std::max(start, n - Int(live["size"]) + 1);
    if (live["rule"] == "chunk") start = std::max(start, n / Int(live["size"]) * Int(live["size"]));
    vector<Int> found;
    for (Int row = part["tokens_per_state"], p = start / row * row; start < n && p < n; p += row) found.push_back(p);
    return found;
  }
};

vector<Int> candidates(const Json& policy, Int reader, const vector<Int>& replicas) {  // Rule 5.
  if (policy["name"] == "first") return {replicas[0]};
  if (policy["name"] != "nearest") return replicas;
  vector<Int> near;
  for (Int r : replicas)
    if (policy["producer_nodes"][r] == policy["consumer_nodes"][reader]) near.push_back(r);
  return near.empty() ? replicas : near;
}

// The slices of one part of layers with one stage of the producer. Rules 5 and 6.
void plan(const Engine& from, const Engine& to, const Json& policy, const vector<string>& layers, const string& name,
          set<Slice>& slices) {
  map<pair<Context, Range>, vector<Int>> classes;
  for (Int p = 0; p < from.size; p++)
    if (from.rank(p)["pp"] == from.stage.at(layers[0]))
      classes[{from.context(layers[0], p), from.units(*from.part.at({layers[0], name}), p)}].push_back(p);
  set<Int> stages;
  for (auto& layer : layers) stages.insert(to.stage.at(layer));
  for (auto& [key, replicas] : classes) {
    auto& [context, units] = key;
    map<Int, Range> readers;
    for (Int c = 0; c < to.size; c++) {
      Range own = to.units(*to.part.at({layers[0], name}), c);
      Range both = {std::max(own.first, units.first), std::min(own.second, units.second)};
      bool here = stages.count(to.rank(c)["pp"]) && context.meets(to.context(layers[0], c));
      if (here && both.first < both.second) readers[c] = both;
    }
    for (auto& [c, both] : readers) {
      vector<Int> among = candidates(policy, c, replicas);
      Int M = among.size(), K = 0, i = 0, first = to.units(*to.part.at({layers[0], name}), c).first;
      for (auto& [other, _] : readers)
        if (candidates(policy, other, replicas) == among) i += other < c, K++;
      bool striped = policy["name"] == "stripe" && M > 1;
      for (Int b = 0, blocks = striped ? M / std::gcd(K, M) : 1; b < blocks; b++)
        for (auto& layer : layers)
          if (Int p = among[((striped ? b * K + i : i * M / K) + Int(policy["salt"])) % M];
              to.stage.at(layer) == to.rank(c)["pp"])
            slices.insert({p, c, layer, name, both, {both.first - units.first, both.second - units.first},
                           {both.first - first, both.second - first}, {b, blocks}});
    }
  }
}

Bytes copies(const Engine& from, const Engine& to, const Json& request, const set<Slice>& slices) {  // Rule 6.
  Bytes found;
  for (auto& [p, c, layer, name, units, from_units, to_units, stripe] : slices) {
    auto &source = from.region(p, layer, name), &target = to.region(c, layer, name), &part = *to.part.at({layer, name});
    Context left = from.context(layer, p), right = to.context(layer, c);
    Int virtual_block = Int(to.group.at(layer)->at("block_size")) * right.size, size = part["content_bytes"];
    for (Int t : to.rows(request, layer, part))
      if (left.owns(t) && right.owns(t) && t / virtual_block % stripe.second == stripe.first)
        for (Int u = 0; u < units.second - units.first; u++) {
          auto [m, a] = from.place(p, request["producer_blocks"], source, t, from_units.first + u);
          auto [n, b] = to.place(c, request["consumer_blocks"], target, t, to_units.first + u);
          for (Int byte = 0; byte < size; byte++) found.push_back({p, c, m, a + byte, n, b + byte});
        }
  }
  return found;
}

// Cover: each wanted byte of each consumer rank is written once, and no other byte. Rule 6.
bool covers(const Engine& to, const Json& request, const Bytes& bytes) {
  vector<tuple<Int, Int, Int>> written, wanted;
  for (auto& byte : bytes) written.emplace_back(byte[1], byte[4], byte[5]);
  for (Int c = 0; c < to.size; c++)
    for (auto& r : to.rank(c)["regions"])
      for (const Json& part = *to.part.at({r["layer"], r["part"]}); Int t : to.rows(request, r["layer"], part))
        for (Int u = 0; to.context(r["layer"], c).owns(t) && u < Int(r["units"]); u++) {
          auto [m, offset] = to.place(c, request["consumer_blocks"], r, t, u);
          for (Int byte = 0; byte < Int(part["content_bytes"]); byte++) wanted.emplace_back(c, m, offset + byte);
        }
  return sorted(written) == sorted(wanted);
}

int main(int count, char** names) {
  bool right = true;
  for (int i = 1; i < count; i++) {
    Json file = Json::parse(std::ifstream(names[i]));
    if (file["format"] != "kvspec-vectors" || file["version"] != 1) return 2;
    string family = file["family"];
    size_t total = file["vectors"].size(), same[3] = {};
    std::printf("%-10s %4zu vectors", family.c_str(), total);
    for (auto& v : FAMILIES.count(family) ? file["vectors"] : Json::array()) {
      Engine from(v["producer"]), to(v["consumer"]);
      set<Slice> slices, planned;
      map<tuple<const Json*, const Json*, Int>, vector<string>> sets;  // Rule 5: layers of one class.
      for (auto& [layer, kind] : to.kind) sets[{kind, from.group[layer], from.stage[layer]}].push_back(layer);
      for (auto& [key, layers] : sets)
        for (auto& part : std::get<0>(key)->at("parts")) plan(from, to, v["policy"], layers, part["name"], planned);
      for (auto& s : v["expected"]["slices"])
        for (string layer : s["layers"])
          for (string part : s["parts"])
            slices.insert({s["producer"], s["consumer"], layer, part, s["units"], s["producer_units"],
                           s["consumer_units"], s["stripe"]});
      Bytes moved;
      for (auto& pair : v["expected"]["copies"])
        for (auto& [m, a, n, b, length] : pair["copies"].get<vector<std::array<Int, 5>>>())
          for (Int i = 0; i < length; i++) moved.push_back({pair["producer"], pair["consumer"], m, a + i, n, b + i});
      same[0] += planned == slices;
      same[1] += sorted(copies(from, to, v["request"], slices)) == sorted(moved);
      same[2] += covers(to, v["request"], moved);
    }
    std::printf(FAMILIES.count(family) ? ": slices of %zu, copies of %zu and cover of %zu agree\n" : ": skipped\n",
                same[0], same[1], same[2]);
    right &= !FAMILIES.count(family) || std::min({same[0], same[1], same[2]}) == total;
  }
  return right ? 0 : 1;
}
