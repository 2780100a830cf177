# Completion of flatout in fish. To use it in every shell:
#   flatout completions fish > ~/.config/fish/completions/flatout.fish
function __flatout_complete
    set -l words (commandline -opc) (commandline -ct)
    set -l found ($words[1] complete -- $words 2> /dev/null)
    if test (count $found) -eq 0
        __fish_complete_path (commandline -ct)
    else
        printf '%s\n' $found
    end
end
complete -c flatout -f -a '(__flatout_complete)'
