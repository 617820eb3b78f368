//! What a refusal says.

/// Checks a refusal: it says something, has a hint, and neither can move a terminal's cursor but to the next line.
///
/// # Panics
/// If it does not.
pub fn check_said(message: &str, hint: &str) {
    for text in [message, hint] {
        assert!(!text.trim().is_empty(), "a refusal without words: {message:?}, hint {hint:?}");
        let wild = text.chars().find(|&c| c.is_control() && c != '\n');
        assert_eq!(wild, None, "a control character in {text:?}");
    }
}
