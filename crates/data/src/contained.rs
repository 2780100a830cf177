//! Turns panics of a library on unexpected files into error messages.

use std::any::Any;
use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::sync::Once;

thread_local! {
    static CONTAINED: Cell<bool> = const { Cell::new(false) };
}

/// Returns the result of `work`, or the message it panicked with. Prints nothing; panics of other threads are still printed.
/// `work` owns what it touches, so that nothing half-changed is left behind.
pub(crate) fn contained<T>(work: impl FnOnce() -> T) -> Result<T, String> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !CONTAINED.get() {
                print(info);
            }
        }));
    });
    let outer = CONTAINED.replace(true);
    let done = panic::catch_unwind(AssertUnwindSafe(work));
    CONTAINED.set(outer);
    done.map_err(|panic| panic_message(panic.as_ref()))
}

fn panic_message(panic: &(dyn Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("no reason was given").trim_end_matches('.').replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_panic_becomes_its_message() {
        assert_eq!(contained(|| 3), Ok(3));
        assert_eq!(contained(|| panic!("no {}", "luck")), Err::<(), _>("no luck".into()));
        assert!(panic::catch_unwind(|| panic!("printed")).is_err());
    }
}
