#include "model/expert_store.h"

#include <fmt/format.h>
#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>

#include "model/weight_codes.h"
#include "storage/loader.h"

namespace firn::model {
namespace {

constexpr int64_t kAlign = 64;
constexpr int64_t kPage = 4096;

int64_t aligned(int64_t bytes, int64_t to) { return (bytes + to - 1) / to * to; }

int part_of(Role role) {
  switch (role) {
    case Role::kExpertGate:
      return 0;
    case Role::kExpertUp:
      return 1;
    case Role::kExpertDown:
      return 2;
    default:
      return -1;
  }
}

}  // namespace

int64_t ExpertStore::n_experts(const Survey& survey) { return survey.config.n_moe() * survey.config.experts; }

int64_t ExpertStore::slot_bytes(const Survey& survey) {
  ExpertStore layout(survey);
  if (!layout.lay_out().ok()) return 0;
  int64_t most = 0;
  for (const Expert& e : layout.all_) most = std::max(most, e.slot_bytes);
  return aligned(most, kPage);
}

ExpertStore::ExpertStore(const Survey& survey) : survey_(survey), experts_(survey.config.experts) {}

ExpertStore::~ExpertStore() {
  FIRN_CHECK(walks_.empty(), "a walk outlives its expert store");
  cache_.reset();
}

Status ExpertStore::lay_out() {
  all_.resize(static_cast<size_t>(survey_.config.layers * experts_));
  for (const FoundSlot& found : survey_.found) {
    const int part = part_of(found.slot->role);
    if (part < 0) continue;
    if (found.data == nullptr) return corrupt("an expert's weights are missing; see firn inspect");
    all_[static_cast<size_t>(found.slot->layer * experts_ + found.slot->expert)].parts[part].slot = &found;
  }
  std::map<std::pair<int32_t, int64_t>, const storage::Extent*> extents;  // by shard and offset
  for (const storage::Extent& extent : survey_.checkpoint.extents) extents[{0, extent.offset}] = &extent;
  for (Expert& e : all_) {
    if (e.parts[0].slot == nullptr) continue;
    int64_t at = 0;
    for (Part& part : e.parts) {
      part.data_at = at;
      at += aligned(part.slot->data->bytes, kAlign);
      part.scales_at = at;
      if (part.slot->scales != nullptr) at += aligned(part.slot->scales->bytes, kAlign);
    }
    e.slot_bytes = aligned(at, kPage);
    // In one piece: same file, same distances, page-aligned start.
    const storage::TensorInfo& first = *e.parts[0].slot->data;
    e.one_piece = first.file_offset % kPage == 0;
    for (const Part& part : e.parts) {
      const FoundSlot& f = *part.slot;
      e.one_piece =
          e.one_piece && f.data->shard == first.shard && f.data->file_offset - first.file_offset == part.data_at;
      if (f.scales != nullptr) {
        e.one_piece = e.one_piece && f.scales->shard == first.shard &&
                      f.scales->file_offset - first.file_offset == part.scales_at;
      }
    }
  }
  return {};
}

Status ExpertStore::read_tensor_scales(storage::FileSystem& fs) {
  storage::LoadPlan plan;
  for (const storage::Shard& shard : survey_.checkpoint.shards) plan.paths.push_back(shard.path);
  for (Expert& e : all_) {
    for (Part& part : e.parts) {
      if (part.slot == nullptr || part.slot->scalar == nullptr) continue;
      const storage::TensorInfo& t = *part.slot->scalar;
      plan.ranges.push_back({t.shard, t.file_offset, t.bytes, &part.tensor_scale});
    }
  }
  if (plan.ranges.empty()) return {};
  const auto stats = storage::load(fs, plan, {}, nullptr);
  if (!stats.ok()) return stats.status();
  for (Expert& e : all_) {
    for (Part& part : e.parts) {
      if (part.slot == nullptr || part.slot->scalar == nullptr) continue;
      FIRN_ASSIGN(part.tensor_scale, usable_tensor_scale(*part.slot, part.tensor_scale));
    }
  }
  return {};
}

Result<std::unique_ptr<ExpertStore>> ExpertStore::create(storage::FileSystem& fs, const Survey& survey, Arena* arena,
                                                         storage::IoQueue* queue, int64_t n_slots,
                                                         const storage::PolicyOptions& policy) {
  std::unique_ptr<ExpertStore> store(new ExpertStore(survey));
  FIRN_TRY(store->lay_out());
  FIRN_CHECK(n_slots >= 2, "an expert cache has at least two slots");
  for (const storage::Shard& shard : survey.checkpoint.shards) {
    FIRN_ASSIGN(auto file, fs.open(shard.path, storage::OpenMode::kReadDirect));
    FIRN_ASSIGN(const int64_t bytes, file->size());
    if (bytes < shard.bytes) {
      return corrupt(fmt::format("{}: expected {} bytes, found {}: it changed since its header was read", shard.path,
                                 shard.bytes, bytes));
    }
    store->files_.push_back(std::move(file));
  }
  FIRN_TRY(store->read_tensor_scales(fs));
  store->codes_checked_ = std::make_unique<std::atomic<bool>[]>(store->all_.size());
  FIRN_ASSIGN(store->cache_, storage::SlotCache::create(arena, "expert cache",
                                                        static_cast<int32_t>(std::min<int64_t>(n_slots, INT32_MAX)),
                                                        slot_bytes(survey), policy, queue, store.get()));
  return store;
}

ExpertWeights ExpertStore::weights(int64_t layer, int64_t expert, const std::byte* slot) const {
  const Expert& e = all_[static_cast<size_t>(layer * experts_ + expert)];
  ExpertWeights w;
  WeightView* const views[] = {&w.gate, &w.up, &w.down};
  for (int i = 0; i < 3; ++i) {
    const Part& part = e.parts[i];
    views[i]->format = part.slot->format;
    views[i]->rows = part.slot->slot->shape[0];
    views[i]->cols = part.slot->slot->shape[1];
    views[i]->data = slot + part.data_at;
    views[i]->scales = part.slot->scales != nullptr ? slot + part.scales_at : nullptr;
    views[i]->tensor_scale = part.tensor_scale;
  }
  return w;
}

int64_t ExpertStore::bytes(int64_t layer, int64_t expert) const {
  int64_t total = 0;
  for (const Part& part : all_[static_cast<size_t>(layer * experts_ + expert)].parts) {
    total += part.slot->data->bytes + (part.slot->scales != nullptr ? part.slot->scales->bytes : 0);
  }
  return total;
}

Result<storage::IoRead> ExpertStore::read_of(storage::SlotKey key, std::span<std::byte> slot) {
  const size_t at = static_cast<size_t>(key);
  FIRN_CHECK(at < all_.size() && all_[at].parts[0].slot != nullptr, "no such expert");
  const Expert& e = all_[at];
  storage::IoRead read;
  const auto piece = [&](const storage::TensorInfo& t, int64_t to) {
    read.pieces.push_back({files_[static_cast<size_t>(t.shard)].get(), t.file_offset, t.bytes, slot.data() + to});
  };
  if (e.one_piece) {
    const storage::TensorInfo& first = *e.parts[0].slot->data;
    // The rest of the last page too, so that the read stays direct; a checkpoint's last bytes may end before it.
    const int64_t shard_bytes = survey_.checkpoint.shards[static_cast<size_t>(first.shard)].bytes;
    const int64_t n = std::min(e.slot_bytes, shard_bytes - first.file_offset);
    read.pieces.push_back({files_[static_cast<size_t>(first.shard)].get(), first.file_offset, n, slot.data()});
  } else {
    for (const Part& part : e.parts) {
      piece(*part.slot->data, part.data_at);
      if (part.slot->scales != nullptr) piece(*part.slot->scales, part.scales_at);
    }
  }
  read.finish = [this, at, data = slot.data()] { return check(at, data); };
  return read;
}

Status ExpertStore::check(size_t at, const std::byte* slot) {
  const Expert& e = all_[at];
  if (e.has_checksum) {
    const uint64_t found = XXH3_64bits(slot, static_cast<size_t>(e.extent_bytes));
    if (found != e.checksum) {
      return corrupt(
          fmt::format("{}: expert {} of layer {}: expected checksum {:016x}, found {:016x}: the file is damaged; check "
                      "it with firn "
                      "pack --verify",
                      survey_.checkpoint.path, static_cast<int64_t>(at) % experts_, static_cast<int64_t>(at) / experts_,
                      e.checksum, found));
    }
  }
  if (codes_checked_[at].load(std::memory_order_relaxed)) return {};
  for (const Part& part : e.parts) {
    FIRN_TRY(check_weight_codes(*part.slot, slot + part.data_at));
    FIRN_TRY(check_scale_codes(*part.slot, slot + part.scales_at));
  }
  codes_checked_[at].store(true, std::memory_order_relaxed);
  return {};
}

bool ExpertStore::reclaim(const ExpertWalk* but) {
  bool any = false;
  for (ExpertWalk* walk : walks_) any = (walk != but && walk->release_ahead()) || any;
  return any;
}

ExpertWalk::ExpertWalk(ExpertStore* store, int64_t layer, std::vector<int32_t> ids)
    : store_(store), layer_(layer), ids_(std::move(ids)), pins_(ids_.size()), done_(ids_.size(), false) {
  store_->walks_.push_back(this);
  // What is there is held before misses push it out, but never so much that nothing could load.
  storage::SlotCache& cache = store_->cache();
  int32_t room = cache.n_slots() - cache.pinned() - 1;
  for (size_t i = 0; i < ids_.size() && room > 0; ++i) {
    if (!cache.contains(store_->key(layer_, ids_[i]))) continue;
    auto pin = cache.find(store_->key(layer_, ids_[i]));
    if (!pin) continue;
    pins_[i] = std::move(*pin);
    --room;
  }
}

ExpertWalk::~ExpertWalk() { std::erase(store_->walks_, this); }

bool ExpertWalk::release_ahead() {
  bool any = false;
  for (storage::SlotCache::Pin& pin : pins_) {
    if (!pin) continue;
    pin.release();
    any = true;
  }
  next_ = first_;
  return any;
}

Status ExpertWalk::ask() {
  for (; next_ < ids_.size(); ++next_) {
    if (done_[next_] || pins_[next_]) continue;
    FIRN_ASSIGN(auto pin, store_->cache().acquire(store_->key(layer_, ids_[next_])));
    if (!pin.has_value()) break;
    pins_[next_] = std::move(*pin);
  }
  return {};
}

Status ExpertWalk::each(std::span<const int32_t> ids, bool keep_last,
                        const std::function<Status(std::span<const Ready>)>& compute) {
  if (ids.empty()) return {};
  const auto first = std::lower_bound(ids_.begin(), ids_.end(), ids.front()) - ids_.begin();
  const size_t begin = static_cast<size_t>(first), end = begin + ids.size();
  FIRN_CHECK(end <= ids_.size() && std::equal(ids.begin(), ids.end(), ids_.begin() + first),
             "experts asked for in an order other than the walk's");
  size_t left = 0;
  for (size_t i = begin; i < end; ++i) {
    // The last of the step before may come again.
    if (done_[i]) {
      done_[i] = false;
      first_ = std::min(first_, i);
      next_ = std::min(next_, i);
    }
    ++left;
  }
  std::vector<Ready> batch;
  std::vector<size_t> which;
  bool reclaimed = false;
  while (left > 0) {
    FIRN_TRY(ask());
    batch.clear();
    which.clear();
    size_t waiting = ids_.size();
    for (size_t i = begin; i < end; ++i) {
      if (done_[i] || !pins_[i]) continue;
      if (pins_[i].ready()) {
        FIRN_TRY(pins_[i].wait());
        batch.push_back({ids_[i], store_->weights(layer_, ids_[i], pins_[i].data())});
        which.push_back(i);
      } else if (waiting == ids_.size()) {
        waiting = i;
      }
    }
    if (batch.empty()) {
      if (waiting < ids_.size()) {
        FIRN_TRY(pins_[waiting].wait());
        continue;
      }
      // Nothing of this step is on its way: pins of other steps, guesses, or another wave's pins hold every slot.
      bool freed = false;
      for (size_t i = 0; i < ids_.size(); ++i) {
        if (i >= begin && i < end) continue;
        freed = freed || static_cast<bool>(pins_[i]);
        pins_[i].release();
      }
      next_ = begin;
      while (next_ < end && done_[next_]) ++next_;
      FIRN_ASSIGN(auto pin, store_->cache().acquire_waiting(store_->key(layer_, ids_[next_])));
      if (pin.has_value()) {
        pins_[next_] = std::move(*pin);
        continue;
      }
      if (freed || (!reclaimed && store_->reclaim(this))) {
        reclaimed = !freed;
        continue;
      }
      return no_memory(fmt::format("the expert cache has {} slots and all of them are in use: give more --expert-ram",
                                   store_->cache().n_slots()));
    }
    FIRN_TRY(compute(batch));
    for (const size_t i : which) {
      done_[i] = true;
      --left;
      if (!keep_last || i + 1 != end) pins_[i].release();
    }
    while (first_ < ids_.size() && done_[first_]) ++first_;
  }
  return ask();  // the disk works while the caller computes something else
}

}  // namespace firn::model
