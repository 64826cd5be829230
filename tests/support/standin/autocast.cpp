// Autocast for the stand-in device: the lists of ops that run in the lower precision, in float32, or in the widest dtype.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

namespace at::autocast {  // declared here, since the header would bring every op of torch with it
TORCH_API Tensor cached_cast(at::ScalarType to_type, const Tensor& arg, c10::DeviceType device_type);
TORCH_API at::ScalarType get_autocast_dtype(at::DeviceType device_type);
}  // namespace at::autocast

namespace standin {
namespace {

constexpr auto kType = c10::DeviceType::PrivateUse1;
enum class Rule { Lower, Float32, Dtype, Widest };

bool eligible(const at::Tensor& tensor) {
  return tensor.defined() && tensor.device().type() == kType && tensor.is_floating_point() && tensor.scalar_type() != at::kDouble;
}

c10::IValue cast(const c10::IValue& value, at::ScalarType dtype) {
  auto one = [&](const at::Tensor& tensor) {
    return tensor.defined() ? at::autocast::cached_cast(dtype, tensor, kType) : tensor;
  };
  if (value.isTensor()) return one(value.toTensor());
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorList()) list.push_back(one(tensor));
    return list;
  }
  return value;
}

template <Rule rule>
void run(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard without_autocast(c10::autocast_dispatch_keyset);
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  if constexpr (rule == Rule::Dtype) {
    bool first = (*stack)[begin].isTensor() && eligible((*stack)[begin].toTensor());
    for (size_t i = 0; first && i < arguments.size(); ++i)
      if (arguments[i].name() == "dtype" && (*stack)[begin + i].isNone()) (*stack)[begin + i] = at::kFloat;
    op.callBoxed(stack);
    return;
  }
  at::ScalarType dtype = rule == Rule::Float32 ? at::kFloat : at::autocast::get_autocast_dtype(kType);
  if constexpr (rule == Rule::Widest)
    for (size_t i = 0; i < arguments.size(); ++i) {
      const c10::IValue& value = (*stack)[begin + i];
      if (value.isTensor() && eligible(value.toTensor()) && value.toTensor().scalar_type() == at::kFloat) dtype = at::kFloat;
    }
  for (size_t i = 0; i < arguments.size(); ++i) (*stack)[begin + i] = cast((*stack)[begin + i], dtype);
  op.callBoxed(stack);
}

void refuse(const c10::OperatorHandle&, torch::jit::Stack*) {
  TORCH_CHECK(false, "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to autocast. "
                     "Use binary_cross_entropy_with_logits or BCEWithLogitsLoss.");
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name :
       {"_convolution.deprecated", "_convolution", "conv1d", "conv2d", "conv3d", "conv_tbc", "conv_transpose1d",
        "conv_transpose2d.input", "conv_transpose3d.input", "convolution", "prelu", "addmm", "addmv", "addr", "matmul", "einsum",
        "mm", "mv", "linalg_vecdot", "linear", "addbmm", "baddbmm", "bmm", "chain_matmul", "linalg_multi_dot",
        "_thnn_fused_lstm_cell", "_thnn_fused_gru_cell", "lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell",
        "scaled_dot_product_attention"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<Rule::Lower>>());
  for (const char* name :
       {"acos", "asin", "cosh", "erfinv", "exp", "expm1", "log", "log10", "log2", "log1p", "reciprocal", "rsqrt", "sinh", "tan",
        "pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", "softplus", "layer_norm", "native_layer_norm", "rms_norm",
        "group_norm", "cosine_similarity", "poisson_nll_loss", "cosine_embedding_loss", "nll_loss", "nll_loss2d",
        "hinge_embedding_loss", "kl_div", "l1_loss", "smooth_l1_loss", "huber_loss", "mse_loss", "margin_ranking_loss",
        "multilabel_margin_loss", "soft_margin_loss", "triplet_margin_loss", "multi_margin_loss",
        "binary_cross_entropy_with_logits", "dist", "pdist", "cdist", "renorm", "logsumexp", "norm.Scalar", "norm.ScalarOpt_dim",
        "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d",
        "upsample_trilinear3d", "upsample_bicubic2d"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<Rule::Float32>>());
  for (const char* name : {"prod", "prod.dim_int", "softmax.int", "log_softmax.int", "cumprod", "cumsum", "linalg_vector_norm",
                           "linalg_matrix_norm", "linalg_matrix_norm.str_ord", "sum", "sum.dim_IntList"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<Rule::Dtype>>());
  for (const char* name : {"addcdiv", "addcmul", "atan2", "bilinear", "cross", "dot", "vdot", "grid_sampler", "index_put",
                           "tensordot", "scatter_add"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&run<Rule::Widest>>());
  m.impl("binary_cross_entropy", torch::CppFunction::makeFromBoxedFunction<&refuse>());
}

}  // namespace
}  // namespace standin
