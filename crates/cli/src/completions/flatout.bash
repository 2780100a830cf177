# Completion of flatout in bash. To use it in every shell:
#   flatout completions bash > ~/.local/share/bash-completion/completions/flatout
_flatout() {
    local -a words
    read -ra words <<< "${COMP_LINE:0:COMP_POINT}"
    [[ ${COMP_LINE:0:COMP_POINT} == *[[:space:]] ]] && words+=("")
    local last=${words[${#words[@]} - 1]}
    local IFS=$'\n'
    COMPREPLY=($("${words[0]}" complete -- "${words[@]}" 2> /dev/null | cut -f 1))
    # Readline completes the part of the word after the last = or : that splits words.
    local before=${last%"${last##*[=:]}"}
    [[ $COMP_WORDBREAKS == *=* ]] && COMPREPLY=("${COMPREPLY[@]#"$before"}")
    [[ ${#COMPREPLY[@]} -eq 1 && ${COMPREPLY[0]} == *= ]] && compopt -o nospace
    return 0
}
complete -o default -o bashdefault -F _flatout flatout
