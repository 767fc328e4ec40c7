#include "model/place_weights.h"

#include <cstring>

namespace firn::model {

namespace {

constexpr int64_t kAlign = 64;
int64_t aligned(int64_t bytes) { return (bytes + kAlign - 1) / kAlign * kAlign; }

// Two passes over the same enumeration: measure, then copy.
class Placer {
 public:
  Placer(Ops* ops, std::byte* base) : ops_(ops), base_(base) {}

  void place(const void** data, int64_t bytes) {
    if (*data == nullptr || bytes == 0) return;
    if (base_ != nullptr) {
      std::byte* to = base_ + at_;
      last_ = ops_->upload(to, *data, bytes);
      *data = to;
    }
    at_ += aligned(bytes);
  }
  void place(WeightView* w) {
    if (w->empty()) return;
    place(&w->data, weight_data_bytes(w->format, w->rows, w->cols));
    place(&w->scales, weight_scale_bytes(w->format, w->rows, w->cols));
    if (base_ != nullptr) w->space = ops_->space();
  }
  void place(NormWeight* n) { place(&n->data, n->n * static_cast<int64_t>(dtype_bytes(n->dtype))); }
  void place(ConstMatrixView* m) {
    place(&m->data, m->rows * m->stride * static_cast<int64_t>(dtype_bytes(m->dtype)));
    if (base_ != nullptr) m->space = ops_->space();
  }
  int64_t bytes() const { return at_; }
  Ticket last() const { return last_; }

 private:
  Ops* ops_;
  std::byte* base_;
  int64_t at_ = 0;
  Ticket last_;
};

void place_all(Placer* p, Weights* w) {
  p->place(&w->embed);
  p->place(&w->lm_head);
  p->place(&w->final_norm);
  for (LayerWeights& l : w->layers) {
    for (NormWeight* n : {&l.input_norm, &l.post_norm, &l.q_norm, &l.k_norm, &l.index_q_norm, &l.index_k_norm})
      p->place(n);
    for (WeightView* m : {&l.q, &l.k, &l.v, &l.o, &l.index_q, &l.index_k, &l.mlp_gate, &l.mlp_up, &l.mlp_down,
                          &l.router, &l.shared_gate, &l.shared_up, &l.shared_down}) {
      p->place(m);
    }
    p->place(&l.router_bias);
    for (ExpertWeights& e : l.experts) {
      for (WeightView* m : {&e.gate, &e.up, &e.down}) p->place(m);
    }
  }
}

}  // namespace

Result<Weights> place_weights(const Weights& host, Ops& ops,
                              const std::function<bool(WeightClass, int64_t layer, int64_t expert)>& take) {
  Weights placed;
  placed.embed = host.embed;
  placed.lm_head = host.lm_head;
  placed.final_norm = host.final_norm;
  placed.layers = host.layers;
  if (!take(WeightClass::kResident, -1, -1)) {
    placed.embed = placed.lm_head = WeightView();
    placed.final_norm = NormWeight();
  }
  for (size_t l = 0; l < placed.layers.size(); ++l) {
    LayerWeights& layer = placed.layers[l];
    std::vector<ExpertWeights> experts = std::move(layer.experts);
    if (!take(WeightClass::kResident, static_cast<int64_t>(l), -1)) layer = LayerWeights();
    for (size_t e = 0; e < experts.size(); ++e) {
      if (!take(WeightClass::kExpert, static_cast<int64_t>(l), static_cast<int64_t>(e))) experts[e] = ExpertWeights();
    }
    layer.experts = std::move(experts);
  }
  Placer measure(&ops, nullptr);
  place_all(&measure, &placed);
  FIRN_ASSIGN(Buffer buffer, ops.arena().allocate(measure.bytes(), "weights on a device"));
  Placer copy(&ops, buffer.as<std::byte>());
  place_all(&copy, &placed);
  if (copy.bytes() > 0) FIRN_TRY(ops.wait(copy.last()));
  placed.bytes = copy.bytes();
  placed.buffers.push_back(std::move(buffer));
  return placed;
}

}  // namespace firn::model
