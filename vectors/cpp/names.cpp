// Compare the vectors of page names with rule 10 of docs/spec.md. It needs nothing but the standard library.
// Usage: names names.json   Exit status 0: all agree. 1: a vector differs. 2: another format or version.
#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <string>
#include <tuple>
#include <vector>
using std::string, std::vector;

struct Json {  // A value of the file. A text is kept as it must enter a digest: in quotes, with escapes.
  string text;
  vector<Json> list;
  std::map<string, Json> object;
  long long number() const { return std::stoll(text); }
  string hex() const { return text.substr(1, text.size() - 2); }
  const Json& operator[](const string& key) const { return object.at('"' + key + '"'); }
};

const char* at;  // The next character of the file.

char next() {
  while (*at == ' ' || *at == '\n') ++at;
  return *at;
}

// Python writes the file, and escapes as rule 10 does. So texts need no change.
Json parse() {
  Json value;
  const char* start = at + (next(), 0);
  if (*start == '"') {
    for (++at; *at != '"'; ++at) at += *at == '\\';
    value.text = string(start, ++at);
  } else if (*start == '[' || *start == '{') {
    for (++at; next() != ']' && *at != '}'; at += next() == ',') {
      Json member = parse();
      if (*start == '[') {
        value.list.push_back(member);
      } else {
        next(), ++at;  // The colon.
        value.object[member.text] = parse();
      }
    }
    ++at;
  } else {
    while (*at == '-' || (*at >= '0' && *at <= '9')) value.text += *at++;
  }
  return value;
}

string written(const std::map<string, string>& members) {  // A map is sorted by its keys.
  string text;
  for (const auto& [key, value] : members) text += (text.empty() ? "\"" : ",\"") + key + "\":" + value;
  return "{" + text + "}";
}

string sha256(string data) {  // FIPS 180-4. The constants are bits of roots of the first primes.
  static vector<uint32_t> roots, start;
  for (unsigned prime = 2; roots.size() < 64; ++prime) {
    bool divided = false;
    for (unsigned factor = 2; factor * factor <= prime; ++factor) divided |= prime % factor == 0;
    if (divided) continue;
    auto bits = [&](int power) {  // The first 32 bits behind the point, by integers alone.
      unsigned __int128 low = 0, high = (unsigned __int128)1 << 37;
      while (high - low > 1) {
        unsigned __int128 middle = (low + high) / 2, product = middle * middle;
        bool larger = power == 2 ? product > ((unsigned __int128)prime << 64)
                                 : product > (((unsigned __int128)prime << 96) / middle);
        (larger ? high : low) = middle;
      }
      return uint32_t(low);
    };
    roots.push_back(bits(3));
    if (start.size() < 8) start.push_back(bits(2));
  }
  uint64_t length = data.size() * 8;
  data += '\x80';
  while (data.size() % 64 != 56) data += '\0';
  for (int shift = 56; shift >= 0; shift -= 8) data += char(length >> shift);
  vector<uint32_t> sums = start;
  for (size_t block = 0; block < data.size(); block += 64) {
    uint32_t w[64];
    for (int i = 0; i < 16; ++i) {
      w[i] = 0;
      for (int byte = 0; byte < 4; ++byte) w[i] = w[i] << 8 | uint8_t(data[block + 4 * i + byte]);
    }
    for (int i = 16; i < 64; ++i) {
      uint32_t a = w[i - 15], b = w[i - 2];
      w[i] = w[i - 16] + (std::rotr(a, 7) ^ std::rotr(a, 18) ^ a >> 3) + w[i - 7] +
             (std::rotr(b, 17) ^ std::rotr(b, 19) ^ b >> 10);
    }
    auto s = sums;
    for (int i = 0; i < 64; ++i) {
      uint32_t e = s[4], a = s[0];
      uint32_t t = s[7] + (std::rotr(e, 6) ^ std::rotr(e, 11) ^ std::rotr(e, 25)) + ((e & s[5]) ^ (~e & s[6])) +
                   roots[i] + w[i];
      uint32_t u = (std::rotr(a, 2) ^ std::rotr(a, 13) ^ std::rotr(a, 22)) +
                   ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
      s = {t + u, s[0], s[1], s[2], s[3] + t, s[4], s[5], s[6]};
    }
    for (int i = 0; i < 8; ++i) sums[i] += s[i];
  }
  string digest;
  for (uint32_t word : sums)
    for (int shift = 24; shift >= 0; shift -= 8) digest += char(word >> shift);
  return digest;
}

string hex(const string& bytes) {
  string digits;
  for (uint8_t byte : bytes) (digits += "0123456789abcdef"[byte >> 4]) += "0123456789abcdef"[byte & 15];
  return digits;
}

string quoted(const string& bytes) { return '"' + hex(bytes) + '"'; }

bool agrees(const Json& vector_) {
  std::map<string, string> model;
  for (const auto& [key, value] : vector_["model"].object) model[key.substr(1, key.size() - 2)] = value.text;
  const Json& prompt = vector_["prompt"];
  string space = sha256(written(
      {{"version", "1"}, {"model", quoted(sha256(written(model)))}, {"placement", vector_["placement"].text}}));
  string name = sha256(written({{"version", "1"},
                                {"space", quoted(space)},
                                {"page_tokens", vector_["page_tokens"].text},
                                {"adapter", prompt["adapter"].text},
                                {"embeddings", prompt["embeddings"].text},
                                {"salt", prompt["salt"].text}}));
  long long size = vector_["page_tokens"].number();
  const auto &tokens = vector_["token_ids"].list, &names = vector_["names"].list;
  bool right = hex(space) == vector_["space"].hex() && names.size() == tokens.size() / size;
  for (size_t page = 0; right && page < names.size(); ++page) {
    string content = name, media;
    for (long long i = 0; i < size; ++i) {
      uint64_t token = tokens[page * size + i].number();
      for (int shift = 0; shift < 64; shift += 8) content += char(token >> shift);
    }
    for (const Json& item : prompt["media"].list)  // The file has them in the order of the rule.
      if (uint64_t(item.list[1].number() / size) == page)
        media += (media.empty() ? "[" : ",[") + item.list[0].text + "," + item.list[1].text + "," +
                 item.list[2].text + "]";
    name = sha256(content + (media.empty() ? "" : "[" + media + "]"));
    right = hex(name) == names[page].hex();
  }
  return right;
}

int main(int count, char** arguments) {
  std::ifstream file(count == 2 ? arguments[1] : "");
  string text{std::istreambuf_iterator<char>(file), {}};
  at = text.c_str();
  Json made = parse();
  if (made["format"].text != "\"kvspec-page-names\"" || made["version"].text != "1") return 2;
  const auto& all = made["vectors"].list;
  auto wrong = std::count_if(all.begin(), all.end(), [](const Json& one) { return !agrees(one); });
  std::printf("names: %zu vectors, %zu wrong\n", all.size(), size_t(wrong));
  return wrong > 0;
}
