//! The head of image classes: a product with a bias, and the loss of its classes.

use flatout_ir::{Builder, DType, Init, Tensor};

/// Columns that carry the bias: as many as keep rows aligned for matrix units, of which the first is used.
const BIAS_COLUMNS: usize = 8;

/// States [S, D] to results `loss`, `weight` and, where nothing is dropped, `class_logits` [S, C]. The bias rides as one more
/// column of the weight against a column of ones, so that head and loss stay one operation.
pub fn classify<'g>(b: &'g Builder, x: Tensor<'g>, classes: usize, init: Init, dropout: bool) {
    let (s, d) = (x.dims()[0], x.dims()[1]);
    let weight = b.param("weight", &[classes, d], init);
    let bias = b.param("bias", &[classes], Init::Zeros).reshape(&[classes, 1]);
    let nothing = b.fill(0.0, weight.dtype(), &[classes, BIAS_COLUMNS - 1]);
    let weight = b.concat(&[weight, bias, nothing], 1);
    let x = b.concat(&[x, b.fill(1.0, x.dtype(), &[s, BIAS_COLUMNS])], 1);
    let label = b.input("labels", DType::I32, &[s]);
    let share = b.input("label_weights", DType::F32, &[s]);
    let (loss, _) = x.head_loss(weight, label, share);
    b.result("loss", loss);
    b.result("weight", share.sum(0));
    if !dropout {
        b.result("class_logits", x.linear(weight));
    }
}
