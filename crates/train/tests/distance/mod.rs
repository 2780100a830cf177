//! How far two tensors are apart.

/// The L2 norm of the difference as a share of the wanted tensor's, or the norm itself where that is zero.
pub fn relative<G: Copy + Into<f64>, W: Copy + Into<f64>>(got: &[G], want: &[W]) -> f64 {
    assert_eq!(got.len(), want.len(), "tensors of one shape");
    let square = |x: f64| x * x;
    let off: f64 = got.iter().zip(want).map(|(&g, &w)| square(g.into() - w.into())).sum();
    let size: f64 = want.iter().map(|&w| square(w.into())).sum();
    if size == 0.0 { off.sqrt() } else { (off / size).sqrt() }
}
