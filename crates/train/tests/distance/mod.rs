//! Relative distance between two tensors.

/// The L2 norm of the difference divided by that of the expected tensor, or the norm itself where that is zero.
pub fn relative<G: Copy + Into<f64>, W: Copy + Into<f64>>(got: &[G], want: &[W]) -> f64 {
    assert_eq!(got.len(), want.len(), "tensors of one shape");
    let square = |x: f64| x * x;
    let off: f64 = got.iter().zip(want).map(|(&g, &w)| square(g.into() - w.into())).sum();
    let size: f64 = want.iter().map(|&w| square(w.into())).sum();
    if size == 0.0 { off.sqrt() } else { (off / size).sqrt() }
}
