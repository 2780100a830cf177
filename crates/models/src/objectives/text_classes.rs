//! Classes of texts: cross-entropy of one state a text.

use flatout_ir::{Builder, DType, Tensor};

/// Results `loss` and `weight` of pooled states [S, D] under a head [C, D], weighted sums over texts whose classes are the
/// inputs `labels` and `label_weights`, and where it is asked for `class_logits` [S, C].
pub fn loss<'g>(b: &'g Builder, pooled: Tensor<'g>, head: Tensor<'g>, gives_logits: bool) {
    let texts = pooled.dims()[0];
    let label = b.input("labels", DType::I32, &[texts]);
    let weight = b.input("label_weights", DType::F32, &[texts]);
    let loss = pooled.head_loss(head, label, weight).sum;
    b.result("loss", loss);
    b.result("weight", weight.sum(0));
    if gives_logits {
        b.result("class_logits", pooled.linear(head));
    }
}
