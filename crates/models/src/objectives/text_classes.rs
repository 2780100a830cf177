//! Classes of texts: cross-entropy of one state per text.

use flatout_ir::{Builder, DType, Tensor};

/// Results `loss` and `weight` for pooled states [S, D] under a head [C, D], weighted sums over texts with the inputs `labels`
/// and `label_weights`, and on request `class_logits` [S, C].
///
/// The `bias` [C] of the classes is a column of the head for a state element that is always 1.
pub fn loss<'g>(
    b: &'g Builder,
    pooled: Tensor<'g>,
    head: Tensor<'g>,
    bias: Option<Tensor<'g>>,
    gives_logits: bool,
) {
    let texts = pooled.dims()[0];
    let [pooled, head] = match bias {
        None => [pooled, head],
        Some(bias) => {
            let one = b.fill(1.0, pooled.dtype(), &[texts, 1]);
            let column = bias.reshape(&[head.dims()[0], 1]);
            [b.concat(&[pooled, one], 1), b.concat(&[head, column], 1)]
        }
    };
    let label = b.input("labels", DType::I32, &[texts]);
    let weight = b.input("label_weights", DType::F32, &[texts]);
    let loss = pooled.head_loss(head, label, weight).sum;
    b.result("loss", loss);
    b.result("weight", weight.sum(0));
    if gives_logits {
        b.result("class_logits", pooled.linear(head));
    }
}
